"""Checksums of the parameters of which several ranks have replicas, below ZeRO 3."""

from __future__ import annotations

from typing import NamedTuple

import torch

from bigtrain.engine.optimizers.masters import master_parts
from bigtrain.engine.train_engine import TrainEngine
from bigtrain.models.parallel.sharding import shard_of

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaChecksums(NamedTuple):
    """Checksums of a rank's values: `parameters`, which must be equal on the ranks of
    `Mesh.replicas`, and `experts`, on the ranks of `Mesh.expert_replicas`."""

    parameters: int
    experts: int


def replica_checksums(engine: TrainEngine) -> ReplicaChecksums:
    """Return the checksums of this rank's parameters, and of masters that all replicas have: the
    sum of `sum_of_bits` of the tensors, each times a different odd number, modulo 2**64. Not
    collective; waits for the device."""
    # Parameters, and masters that are not partitioned, with whether they belong to an expert.
    # Without 16-bit copies parameter and master are one tensor; reading it twice costs little.
    tensors: list[tuple[bool, torch.Tensor]] = []
    for parameter in engine.module.parameters():
        shard = shard_of(parameter)
        tensors.append((shard is not None and shard.over == "expert", parameter))
    for part in master_parts(engine.engine, engine.module):
        if part.is_replicated:
            tensors.append((part.shard.over == "expert", part.of(part.master)))
    sums = torch.zeros(2, dtype=torch.int64, device=engine.device)
    for number, (is_expert, tensor) in enumerate(tensors):
        sums[int(is_expert)] += (2 * number + 1) * sum_of_bits(tensor).to(sums.device)
    parameters, experts = sums.tolist()
    return ReplicaChecksums(parameters=parameters, experts=experts)


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the bits of every element as integers, modulo 2**64: int64, on the device.
    Exact in any order, unlike a sum of floats, and changed by any change within one element."""
    return tensor.detach().view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)
