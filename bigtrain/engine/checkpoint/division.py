"""What each rank writes of a checkpoint, so that every element is written once.

Which rank holds what is a function of the topology: ZeRO gives each replica a range of its own, or
all replicas hold the same. So each rank computes its share without communication.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bigtrain.engine.checkpoint.fragments import Fragment
from bigtrain.engine.checkpoint.layout import Cut, Row
from bigtrain.engine.checkpoint.lazy import BUFFER
from bigtrain.engine.startup.mesh import Mesh


@dataclass(frozen=True)
class Division:
    """keys: the tensors of which this rank writes its part. rows: its part of the layout."""

    keys: frozenset[str]
    rows: tuple[Row, ...]


def divide(
    fragments: Iterable[Fragment], buffers: Mapping[str, torch.Tensor], mesh: Mesh
) -> Division:
    """This rank's share of fragments and buffers. Collective over `mesh.pipeline`.

    A tensor that all replicas hold (for experts: all ranks with the same experts) is assigned to
    the one with the least to write so far; all of them compute the same assignment. Of a tensor
    that several tensor-parallel ranks or stages hold, the `primary` one writes.
    """
    groups = {"tensor": mesh.replicas, "expert": mesh.expert_replicas}
    # Once, not for each parameter: rows that share them are told and kept with one list of ranks.
    members = {over: tuple(dist.get_process_group_ranks(group)) for over, group in groups.items()}
    rows: list[Row] = []
    keys: set[str] = set()
    alike: dict[str, list[tuple[str, Cut, torch.Tensor]]] = {over: [] for over in groups}
    for fragment in fragments:
        if not fragment.shard.primary:
            continue
        shard, capacity = fragment.shard, fragment.capacity
        replicas = members[shard.over]
        place = replicas.index(mesh.rank)
        cut = Cut(shard.shape, shard.dim, shard.ranges, shard.local_size)
        for kind, tensor in fragment.tensors.items():
            key = f"{kind}/{fragment.name}"
            if fragment.is_replicated:
                alike[shard.over].append((key, cut, tensor))
                continue
            keys.add(key)
            if capacity is None or fragment.start != capacity * place:
                rows.append(Row(key, cut, (mesh.rank,), fragment.start, tensor.numel()))
            elif place == 0:  # for all of them
                rows.append(Row(key, cut, replicas, 0, capacity))
    if mesh.coordinates.tensor_rank == 0:
        held_before = _buffers_of_earlier_stages(buffers, mesh)
        alike["tensor"] += [
            (f"{BUFFER}/{name}", Cut(tuple(buffer.shape) or (1,)), buffer)
            for name, buffer in buffers.items()
            if name not in held_before
        ]
    for over, group in groups.items():
        loads = [(0, number) for number in range(dist.get_world_size(group))]
        for key, cut, tensor in alike[over]:
            num_bytes, writer = loads[0]
            heapq.heapreplace(loads, (num_bytes + tensor.numel() * tensor.itemsize, writer))
            if writer == dist.get_rank(group) and tensor.numel():
                keys.add(key)
                rows.append(Row(key, cut, (mesh.rank,), 0, tensor.numel()))
    return Division(frozenset(keys), tuple(rows))


def _buffers_of_earlier_stages(buffers: Mapping[str, torch.Tensor], mesh: Mesh) -> set[str]:
    if mesh.topology.pipeline_size == 1:
        return set()
    stages: list[Any] = [None] * mesh.topology.pipeline_size
    dist.all_gather_object(stages, list(buffers), group=mesh.pipeline)
    return {name for names in stages[: mesh.coordinates.pipeline_rank] for name in names}
