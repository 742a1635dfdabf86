"""Starting processes on hosts: hostfiles, launch scripts, Kubernetes manifests, an elastic
rendezvous, a local world.

Mostly renders text for a launcher; nothing here trains. Imports `settings` and `system`; the
commands, `engine` and `parity` import it. Start with `torchrun` (the command that every script and
manifest runs), then `slurm`, `kubernetes` and `hostfile`; `doctor` checks hosts before a run.
"""
