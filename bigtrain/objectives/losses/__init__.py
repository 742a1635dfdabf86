"""Losses and metrics of kinds of objectives, with torch.

A file here has the loss of the file of the same name in the folder above. `passes.py` has what an
engine offers a loss, what a loss offers the engine, and base classes. The engine imports this
folder; nothing here knows DeepSpeed.
"""
