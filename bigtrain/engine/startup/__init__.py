"""From processes to process groups: rendezvous, device, mesh, DeepSpeed's compiled operators. Start
with `process_group`, then `mesh`; `long_work` and `cpu_collectives` are for small values."""
