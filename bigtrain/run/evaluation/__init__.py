"""Evaluation during training: loss on held-out data.

Imports `data`, `engine`, `reporting` and the session; the loop and `training` import it. There is
one file, `held_out`.
"""
