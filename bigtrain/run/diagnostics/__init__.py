"""Monitoring of each step of a run: bad updates, slow ranks, memory, times, profiles.

Imports `engine`, `models`, `planner` and the session; the loop, `training` and `checkpointing`
import it. Start with `step_guard` (skipped updates) and `step_clock` (time by part of a step).
"""
