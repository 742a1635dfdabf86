"""What a layout costs: memory, seconds and floating-point operations of a model's steps.

Pure: no torch. Imports `settings` and `system`; `models` (which traces what `model_costs` holds),
`run` and the commands import it. Start with `search`, which goes through all legal layouts;
`memory` and `step_time` assess one, by the figures of `hardware` and `engines` in `tables/`;
`evaluation` holds predictions against published measurements.
"""
