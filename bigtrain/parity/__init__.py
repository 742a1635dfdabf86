"""`bigtrain parity`: the user's own model, made small, on every legal topology against one process.

The reference is a loop of the plain transformers model and `torch.optim` in one process
(`reference`); nothing of the engine, of how models are built here or of how parameters are grouped
is in it. Each topology then trains the same few steps in real processes on CPUs (`worker`), and
losses, gradient norms and weights are compared (`comparison`).
"""
