"""How processes get started on hosts: hostfiles, launch scripts, manifests, rendezvous, a local
world.

Mostly text that a launcher reads; nothing here trains. Imports `settings` and `system`; the
commands import it. Start with `torchrun` (the line that every script and manifest runs), then
`slurm`, `kubernetes` and `hostfile`; `doctor` looks at hosts before a run does.
"""
