"""Prediction of memory, time and FLOPs of an optimizer step per parallel layout; ranking of
layouts.

Pure: no torch. Imports `settings` and `system`; `models` (which traces `model_costs`), `engine`
(calibration), `run` and the commands import it. Start with `search`, which assesses all legal
layouts; `memory` and `step_time` predict one, from the tables of devices and engines in `tables/`;
`evaluation` compares predictions with published measurements.
"""
