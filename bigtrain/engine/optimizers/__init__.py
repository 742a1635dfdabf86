"""Optimizers on ZeRO's masters, parameter groups, the gradient norm and skipped updates.

Imports `models` and, of `engine`, `startup` and `deepspeed_patches`; the rest of `engine` imports
it. Start with `build`, then `update_rule`, the interface of our own optimizers (`adamw`, `lion`,
`adafactor`, `muon`), and `masters`, where each ZeRO stage keeps what they update. `skip_step` is
how the step guard skips an update.
"""
