"""DeepSpeed engine of a model, and its optimizer step. Only this package imports deepspeed.

Imports `models`, `data.loading`, `launchers`, `settings` and `system`; `run`, `parity` and the
commands import it. Start with `build`, then `train_engine` (a step); `pipeline` is the same in
stages, `optimizers` contains the optimizers and skipped updates, `checkpoint` writes and reads the
state, `sites` exchanges weights between distant worlds, `startup` opens process groups. Only
`deepspeed_patches` touches private parts of DeepSpeed or replaces its methods.
"""
