"""From processes to process groups: rendezvous, device, mesh, DeepSpeed's compiled operators.

Imports `models`, `launchers`, `settings`, `system` and `deepspeed_patches`; the rest of `engine`,
`parity` and `run` import it. Start with `process_group`, then `mesh`.
"""
