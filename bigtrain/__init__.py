"""bigtrain: train any Hugging Face causal LM under DeepSpeed, on one CPU or on a cluster.

Importing this package does nothing: no I/O, no environment writes, no torch.
"""

__version__ = "0.1.0"
