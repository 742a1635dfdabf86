"""Figures of devices and of training programs, and where each comes from.

Pure, and imports nothing else of the planner. `hardware` and `engines` read the JSON tables beside
them; `calibration_file` what ``bigtrain plan --calibrate`` measured of one machine.
"""
