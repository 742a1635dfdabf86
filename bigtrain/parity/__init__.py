"""`bigtrain parity`: a proxy of the user's model on every legal topology against one process.

The reference is a loop over the plain transformers model and `torch.optim` in one process
(`reference`); it shares no code with the engine, with how models are built here or with how
parameters are grouped. Each topology then trains the same few steps in real processes on CPUs
(`worker`), and losses, gradient norms and weights are compared (`comparison`).

Imports `engine`, `models`, `data`, `launchers` and `settings`; only the command imports it. Start
with `run`.
"""
