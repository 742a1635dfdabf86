"""One rank of many: a process group that moves nothing, and what a block costs its process."""

from __future__ import annotations

import pickle
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

Cost = dict[str, float]
RANKS_OF_HOST = 8


@contextmanager
def world(rank: int, num_ranks: int) -> Iterator[None]:
    """Open a process group of `num_ranks`, of which this process is the only one."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def told_by_all(values: Sequence[Any]) -> Iterator[None]:
    """Make `all_gather_object` return `values` inside, each pickled by another rank."""
    sent = [pickle.dumps(value) for value in values]

    def gather(gathered: list[Any], value: Any, group: Any = None) -> None:
        pickle.dumps(value)
        gathered[:] = map(pickle.loads, sent)

    with mock.patch.object(dist, "all_gather_object", gather):
        yield


class Meter:
    """Processor and clock seconds, and memory above what there was, of the block."""

    def __init__(self) -> None:
        self._memory = _peak_mib()
        self._begun, self._clock = time.process_time(), time.perf_counter()

    def read(self, **more: float) -> Cost:
        seconds, wall = time.process_time() - self._begun, time.perf_counter() - self._clock
        return {"seconds": seconds, "wall": wall, "mib": _peak_mib() - self._memory, **more}


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
