"""A model becomes a DeepSpeed engine with an optimizer step. The only place that imports deepspeed.

Imports `models`, `data.loading` and what is below. Start with `build`, then `train_engine` (a
step); `pipeline` is the same in stages, `optimizers` what happens between backward and update,
`checkpoint` how its state is written and read, `sites` what worlds far from each other exchange,
`startup` how process groups come to be.
`deepspeed_patches` is the only place that touches private parts of
DeepSpeed or replaces its methods.
"""
