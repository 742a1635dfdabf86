"""Training run: session, loop, start and end.

Imports `engine`, `models`, `data`, `planner`, `settings` and `system`; only `train.py` and the
commands import it. Read `training` first (one launch from start to end), then `loop`; `session` has
the open resources of a launch, `preflight` the checks before it.
"""
