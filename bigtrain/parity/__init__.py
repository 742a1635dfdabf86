"""`bigtrain parity`: a proxy model of the user's model on every legal topology, compared with one
process. Start with `run`.

The reference (`reference`) is a loop over the plain transformers model and `torch.optim`; it shares
no code with the engine, model building or parameter grouping. Each topology trains identical steps
in real processes on CPUs (`worker`).
"""
