"""Pipeline parallelism on DeepSpeed's 1F1B schedule. Start with `build`; `engine` is the
`TrainEngine` of a run in stages, `stage_module` the module that the schedule drives."""
