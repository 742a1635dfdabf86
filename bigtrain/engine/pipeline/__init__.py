"""Pipeline parallelism on DeepSpeed's 1F1B schedule.

Imports the rest of `engine` but `checkpoint` and `sites`; only `engine.build` imports it. Start
with `build`; `engine` is the `TrainEngine` of a run in stages, `stage_module` the module that the
schedule drives, `stage_payload` what stages send each other.
"""
