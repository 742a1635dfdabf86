"""Sharding of a model over ranks: tensors, sequences, experts, pipeline stages. Start with
`sharding`, which describes the part of a parameter that a rank has."""
