"""Collectives of small values on the CPU, along a binomial tree of ranks: log(ranks) messages in
sequence, while gloo's rings need 8,190 and 4,095 for 4,096 ranks."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from bigtrain.settings.sections.running import COLLECTIVE_TIMEOUT_SECONDS

Value = TypeVar("Value")


def cpu_group(
    collective_timeout_seconds: float = COLLECTIVE_TIMEOUT_SECONDS,
) -> dist.ProcessGroup:
    """Return a new CPU group of the world's ranks, separate from the group that trains. Collective.
    Destroyed with the process group."""
    timeout = timedelta(seconds=collective_timeout_seconds)
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group


def gather_on_main(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return all ranks' values in rank order on rank 0, an empty list on other ranks. Collective.

    `torch.distributed.gather_object` connects rank 0 to all ranks and pads each value to the
    longest; `all_gather_object` leaves all values on every rank. If one of 4,096 ranks sends 1 MB,
    that is 4 GB.
    """
    return combine_on_main([value], operator.iadd, group) or []


def combine_on_main(
    value: Value,
    combine: Callable[[Value, Value], Value],
    group: dist.ProcessGroup | None = None,
) -> Value | None:
    """Return the values of the world's ranks, combined in rank order, on rank 0, None on other
    ranks. Collective over `group`, a group of the world. combine: combines the values of earlier
    and of later ranks, and may change its first argument; small results keep messages small."""
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    # At each level of the tree half of the ranks send their value to a lower rank, and are done.
    distance = 1
    while distance < num_ranks:
        is_sender = rank % (2 * distance) != 0
        if is_sender:
            peer = rank - distance
            content = bytearray(pickle.dumps(value))
            data = torch.frombuffer(content, dtype=torch.uint8).to(_device(group))
            dist.send(torch.tensor([data.numel()], device=data.device), dst=peer, group=group)
            dist.send(data, dst=peer, group=group)
            return None
        if rank + distance < num_ranks:
            peer = rank + distance
            size = torch.zeros(1, dtype=torch.int64, device=_device(group))
            dist.recv(size, src=peer, group=group)
            data = torch.empty(int(size), dtype=torch.uint8, device=size.device)
            dist.recv(data, src=peer, group=group)
            value = combine(value, pickle.loads(data.cpu().numpy().tobytes()))
        distance *= 2
    return value


def maximum_of_all(values: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Replace each element of `values` by its maximum over all ranks, on every rank. Collective
    over `group`, a CPU group of the world. `values`: equal dtype and shape on every rank."""
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    distance = 1
    while distance < num_ranks:
        is_sender = rank % (2 * distance) != 0
        if is_sender:
            dist.send(values, dst=rank - distance, group=group)
            break
        if rank + distance < num_ranks:
            received = torch.empty_like(values)
            dist.recv(received, src=rank + distance, group=group)
            torch.maximum(values, received, out=values)
        distance *= 2
    dist.broadcast(values, src=0, group=group)  # gloo's broadcast is a binomial tree, too


def _device(group: dist.ProcessGroup | None) -> torch.device:
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
