"""One training run: session, loop, start and end.

Imports `engine`, `models`, `data`, `planner`, `settings` and `system`; only `train.py` and the
commands import it. Read `training` first (one launch from start to end), then `loop`; `session` is
what a launch has open, `preflight` what is checked before there is one.
"""
