"""Cutting a model over ranks: tensors, sequences, pipeline stages.

Start with `tensor`, `sequence` or `stages`; `sharding` says which rectangle of a parameter a rank
has.
"""
