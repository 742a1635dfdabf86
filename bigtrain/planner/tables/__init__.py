"""Specifications of devices and training engines, each with its source.

Pure; imports nothing else of the planner, which imports it, as do `engine`, `run` and the
commands. Start with `hardware` and `engines`, which read the JSON tables next to them
and the measurements of ``bigtrain plan --calibrate`` on one machine.
"""
