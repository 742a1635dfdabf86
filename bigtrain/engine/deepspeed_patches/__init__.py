"""Every private part of DeepSpeed that bigtrain reads, replaces or sets, each with why.

Read in deepspeed 0.19.8. `tests/unit/engine/test_deepspeed_patches.py` has a contract test for
each, which says in one sentence what an upgrade has moved. `step` is the engine's optimizer step,
`zero3_hooks` what ZeRO-3 hangs on modules, `optimizers` the wrappers around the torch optimizer,
`partitions` ZeRO-3's parameters, `marks` what norms go by, `pipeline` the schedule, `startup` how
operators are loaded and groups are known. Imports nothing else of `engine`.
"""
