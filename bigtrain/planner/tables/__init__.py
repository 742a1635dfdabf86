"""Figures of devices and training engines, each with its source.

Pure, and imports nothing else of the planner, which imports it, as do `engine/calibration`, `run`
and the commands. Start with `hardware` and `engines`, which read the JSON tables beside them;
`calibration_file` reads what ``bigtrain plan --calibrate`` measured on one machine.
"""
