"""`bigtrain parity`: a proxy model of the user's model on every legal topology, compared with one
process.

The reference is a loop over the plain transformers model and `torch.optim` in one process
(`reference`); it shares no code with the engine, with model building or with
parameter grouping. Each topology then trains the same few steps in real processes on CPUs
(`worker`), and losses, gradient norms and weights are compared (`comparison`).

Imports `engine`, `models`, `data`, `launchers` and `settings`; only the command imports it. Start
with `run`.
"""
