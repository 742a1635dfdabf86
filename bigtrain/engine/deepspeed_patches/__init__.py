"""Private parts of DeepSpeed 0.19.8 that bigtrain reads, replaces or sets, each with the reason and
a contract test in `tests/unit/engine/deepspeed_patches/`. Start with `step`, the optimizer step.
Imports nothing else of `engine`."""
