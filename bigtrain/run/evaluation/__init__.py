"""Evaluation during training: held-out loss, samples, tasks of lm-eval, early stopping.

Imports `data`, `engine`, `models`, `reporting` and the session; the loop, `training` and `finish`
import it. Start with `evaluator`, which calls the others; `live_model` is their interface to the
engine.
"""
