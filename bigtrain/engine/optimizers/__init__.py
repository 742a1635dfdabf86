"""Optimizers on ZeRO's masters, parameter groups, the gradient norm and skipped updates. Start with
`build`, then `update_rule`, the interface of our own optimizers, and `masters`, the storage."""
