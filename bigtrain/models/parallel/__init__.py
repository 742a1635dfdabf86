"""Cutting a model over ranks: tensors, sequences, experts, pipeline stages.

Imports `layers`, `experts` and the patch modules; `build`, `equivalence` and the engine import it.
Start with `sharding`, which describes the part of a parameter that a rank has; then `tensor`,
`sequence`, `experts` or `stages`.
"""
