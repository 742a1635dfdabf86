"""Collectives of small values on the CPU, along a binomial tree of all ranks: log(ranks) messages
in sequence, where gloo's rings need 8,190 and 4,095 for 4,096 ranks."""

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
    """Return a group of all ranks on the CPU, apart from the one that trains. Collective. Gone with
    the process group."""
    timeout = timedelta(seconds=collective_timeout_seconds)
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group


def gather_on_main(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return all ranks' values in rank order on rank 0, an empty list on the others. Collective.

    `torch.distributed.gather_object` connects rank 0 to all and pads each value to the longest,
    `all_gather_object` leaves all values on every rank: of 4,096 ranks, one of which sends 1 MB, 4
    GB.
    """
    return combine_on_main([value], operator.iadd, group) or []


def combine_on_main(
    value: Value,
    combine: Callable[[Value, Value], Value],
    group: dist.ProcessGroup | None = None,
) -> Value | None:
    """Return what `combine` makes of all ranks' values in rank order on rank 0, None on the others.
    Collective over `group`, of all ranks. combine: gets those of ranks before and after, and may
    change the former; what it leaves small, no rank receives as much as all values are."""
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    distance = 1
    while distance < num_ranks:
        if rank % (2 * distance):
            _send(value, rank - distance, group)
            return None
        if rank + distance < num_ranks:
            value = combine(value, _receive(rank + distance, group))
        distance *= 2
    return value


def maximum_of_all(values: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Replace each element of `values` by its maximum over all ranks, on every rank. Collective
    over `group`, a CPU group of all ranks. `values`: of one dtype and shape everywhere."""
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    distance = 1
    while distance < num_ranks:
        if rank % (2 * distance):
            dist.send(values, dst=rank - distance, group=group)
            break
        if rank + distance < num_ranks:
            theirs = torch.empty_like(values)
            dist.recv(theirs, src=rank + distance, group=group)
            torch.maximum(values, theirs, out=values)
        distance *= 2
    dist.broadcast(values, src=0, group=group)  # along the same tree


def _send(value: Any, rank: int, group: dist.ProcessGroup | None) -> None:
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(_device(group))
    dist.send(torch.tensor([data.numel()], device=data.device), dst=rank, group=group)
    dist.send(data, dst=rank, group=group)


def _receive(rank: int, group: dist.ProcessGroup | None) -> Any:
    size = torch.zeros(1, dtype=torch.int64, device=_device(group))
    dist.recv(size, src=rank, group=group)
    data = torch.empty(int(size), dtype=torch.uint8, device=size.device)
    dist.recv(data, src=rank, group=group)
    return pickle.loads(data.cpu().numpy().tobytes())


def _device(group: dist.ProcessGroup | None) -> torch.device:
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
