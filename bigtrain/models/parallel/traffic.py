"""Bytes sent and time taken in exchanges of rows between ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Traffic:
    """The traffic of one rank, while it is measured. Only `seconds` waits for the device."""

    def __init__(self) -> None:
        self._is_measuring = False
        self._seconds = 0.0
        self._events: list[tuple[Any, Any]] = []
        self.sent_bytes = 0

    def begin(self, *, measuring: bool) -> None:
        """Reset the measurements; `measuring`: whether to measure from here on."""
        self._is_measuring, self.sent_bytes, self._seconds = measuring, 0, 0.0
        self._events.clear()

    @contextmanager
    def exchange(self, num_bytes: int, device: torch.device) -> Iterator[None]:
        """Wrap an exchange in which this rank sends `num_bytes` to others."""
        if not self._is_measuring:
            yield
            return
        self.sent_bytes += num_bytes
        if device.type == "cuda":
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            yield
            ended.record()
            self._events.append((begun, ended))
        else:
            since = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - since

    def seconds(self) -> float:
        """Seconds in exchanges, including waiting for other ranks; on CUDA device time, for which
        the host waits."""
        for _, ended in self._events[-1:]:
            ended.synchronize()
        on_device: float = sum(begun.elapsed_time(ended) for begun, ended in self._events)
        return self._seconds + on_device / 1000
