"""Threads that replace ranks in tests before there is a process group."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_DEADLOCK_SECONDS = 60.0


class RankThreads:
    """An exchange among threads of this process; each enters `as_rank` first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._local = threading.local()
        self._barrier = threading.Barrier(size, timeout=_DEADLOCK_SECONDS)
        self._sent: list[Any] = [None] * size

    @property
    def rank(self) -> int:
        rank: int = self._local.rank
        return rank

    @contextmanager
    def as_rank(self, rank: int) -> Iterator[None]:
        """Inside, this thread is rank `rank`.

        If it fails, it releases the others, which would wait for it.
        """
        self._local.rank = rank
        try:
            yield
        except BaseException:
            self._barrier.abort()
            raise

    def all_to_all(self, blocks: torch.Tensor) -> torch.Tensor:
        """See `bigtrain.models.parallel.sequence.Exchange`."""
        return torch.stack(self._exchange(list(blocks)))

    def rows(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """See `bigtrain.models.parallel.collectives.RowExchange`."""
        parts = self._exchange(list(x.split(sent)))
        assert [len(part) for part in parts] == received
        return torch.cat(parts)

    def _exchange(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        self._sent[self.rank] = parts
        self._barrier.wait()
        received = [sent[self.rank].clone() for sent in self._sent]
        self._barrier.wait()
        return received
