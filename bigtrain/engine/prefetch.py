"""Copying micro-batches to the device while the previous one is computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from bigtrain.data.loading.micro_batch import MicroBatch


@dataclass(frozen=True)
class _Copied:
    batch: MicroBatch
    done: torch.cuda.Event


class DeviceFeed:
    """Copies micro-batches to `device`; on CUDA on a stream of its own, one ahead.

    The host's tensors must be pinned for the copies to overlap (`open_training_data` pins them on
    CUDA); nothing waits for them but the computing stream, when it needs them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batches: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, MicroBatch]]:
        """Pairs of a micro-batch on the host and the same on the device."""
        if self._stream is None:
            for batch in batches:
                yield batch, batch.moved(lambda tensor: tensor.to(self._device))
            return
        ahead: deque[tuple[MicroBatch, _Copied]] = deque()
        for batch in batches:
            ahead.append((batch, self._copy(batch, self._stream)))
            if len(ahead) > 1:
                yield self._when_copied(*ahead.popleft())
        for last in ahead:
            yield self._when_copied(*last)

    def _when_copied(self, batch: MicroBatch, copied: _Copied) -> tuple[MicroBatch, MicroBatch]:
        computing = torch.cuda.current_stream(self._device)
        # Not `computing.wait_event`, which is counted as waiting for other ranks
        # (`bigtrain.models.torch_patches.observed_device_waits`).
        copied.done.wait(computing)
        # Memory of the other stream, in use by this one until the tensors are gone.
        copied.batch.moved(lambda tensor: _in_use(tensor, computing))
        return batch, copied.batch

    def _copy(self, batch: MicroBatch, stream: torch.cuda.Stream) -> _Copied:
        with torch.cuda.stream(stream):
            copied = batch.moved(lambda tensor: tensor.to(self._device, non_blocking=True))
            done = torch.cuda.Event()
            done.record(stream)
        return _Copied(copied, done)


def _in_use(tensor: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
    tensor.record_stream(stream)
    return tensor
