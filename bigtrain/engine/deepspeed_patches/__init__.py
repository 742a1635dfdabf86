"""Private parts of DeepSpeed that bigtrain reads, replaces or sets, each with the reason.

Read in deepspeed 0.19.8. `tests/unit/engine/deepspeed_patches/` has a contract test for each,
which reports in one sentence what an upgrade has changed. Start with `step`, the engine's optimizer
step; `zero3_hooks` is ZeRO-3's module hooks, `zero12` the optimizer of ZeRO 1 and 2,
`zero12_reduction` how that one averages gradients, by a `reduction_plan`; `optimizers` the wrappers
around the torch optimizer, `partitions` ZeRO-3's parameters, `marks` the marks that norms go by,
`experts` expert groups, `host_time` a clock in the hooks, `pipeline` the schedule, `startup` how
operators are loaded and groups are set. Imports nothing else of `engine`; `engine` and
`run.diagnostics` import it.
"""
