"""Starting processes on hosts: hostfiles, launch scripts, Kubernetes manifests, an elastic
rendezvous.

Mostly renders text for a launcher; nothing here trains. Imports `settings` and `system`; only
the commands and the Python API import it. Start with `torchrun` (the command that every script and
manifest runs), then `slurm`, `kubernetes` and `hostfile`; `doctor` checks hosts before a run.
"""
