"""Predictions beside measurements that others published (``bigtrain plan --evaluate``). Pure.

Start with `evaluation`; `rows` reads what a row's columns and words say, `known_models` what a
model's name alone says.
"""
