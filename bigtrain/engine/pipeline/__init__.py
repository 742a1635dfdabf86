"""Pipeline parallelism on DeepSpeed's 1F1B schedule.

Start with `build`; `engine` is the `TrainEngine` of a run in stages, `stage_module` what the
schedule drives, `stage_payload` what stages send each other.
"""
