"""Gathering Python values of all ranks on rank 0, without padding or copies on other ranks."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist


def gather_on_main(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """All ranks' values in rank order on rank 0, an empty list on the others.

    Collective over `group`, of all ranks. Uses a binomial tree, so that every rank connects to
    O(log(ranks)) others. `torch.distributed.gather_object` connects rank 0 to all and pads each
    value to the longest, `all_gather_object` leaves all of them on every rank: with 4,096 ranks,
    one of which sends 1 MB, that is 4 GB.
    """
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    found = [value]  # of this rank and those after it
    distance = 1
    while distance < num_ranks:
        if rank % (2 * distance):
            _send(found, rank - distance, group)
            return []
        if rank + distance < num_ranks:
            found += _receive(rank + distance, group)
        distance *= 2
    return found


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
