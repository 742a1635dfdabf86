"""Predictions compared with published measurements (``bigtrain plan --evaluate``). Pure.

Start with `evaluation`; `rows` reads a row's columns and text, `known_models` the
model's name.
"""
