"""Heartbeat of a rank: its training thread records its position, and its watchdog reads it."""

from __future__ import annotations

import sys
import threading
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from bigtrain.models.layers.parameters import decoder_layers

_COUNTERS = Path("/proc/self/io")
_LEAST_TRANSFER_BYTES = 1 << 20


class Heartbeat:
    """Position of the training thread. A mark costs a fraction of a microsecond; nothing is
    written. activity: human-readable. module: the layer, None outside of layers. slow: whether a
    single operation of this activity may take long. count: number of marks, which grows while
    training makes progress."""

    def __init__(self) -> None:
        self._announced = ""
        self.step = 0
        self.activity = "starting"
        self.module: str | None = None
        self.slow = True
        self.count = 0
        self._num_steps_begun = 0

    def set_activity(self, activity: str, *, slow: bool = False) -> None:
        """Begin `activity` in the training thread; every activity of the first step may be
        slow."""
        self.activity, self.module, self._announced = activity, None, activity
        self.slow = slow or self._num_steps_begun <= 1
        self.count += 1

    def begin_step(self, step: int) -> None:
        """Begin step `step`, counted from 1."""
        self.step = step
        self._num_steps_begun += 1
        self.set_activity("reading the batch")

    def _enter(self, activity: str, module: str) -> None:
        if activity == "forward pass" and self._announced == "backward pass":
            activity = "recomputation in the backward pass"
        self.activity, self.module = activity, module
        self.count += 1

    def _watch_backward(self, module: str, _layer: nn.Module, _args: Any, outputs: Any) -> None:
        first = outputs[0] if isinstance(outputs, tuple) and outputs else outputs
        if torch.is_tensor(first) and first.requires_grad and torch.is_grad_enabled():
            first.register_hook(lambda _gradient: self._enter("backward pass", module))

    def watch_layers(self, model: nn.Module) -> None:
        """Mark every layer of `model` (the members of its outermost module lists) at the start of
        the forward and backward pass, by hooks that add nothing to the graph."""
        for name, layer in decoder_layers(model):
            # Before ZeRO-3's hooks that gather parameters, since those may hang.
            layer.register_forward_pre_hook(
                lambda _layer, _args, name=name: self._enter("forward pass", name), prepend=True
            )
            layer.register_forward_hook(partial(self._watch_backward, name))


class Transfers:
    """File transfers of this rank, as a sign of progress in activities without marks: verifying,
    loading, exports, checkpoints. A rank that waits transfers only its watchdog's messages."""

    def __init__(self) -> None:
        self._seen_bytes = self._num_bytes()

    def made_progress(self) -> bool:
        """Return whether at least a MiB was transferred since the last call that returned True."""
        num_bytes = self._num_bytes()
        if num_bytes - self._seen_bytes < _LEAST_TRANSFER_BYTES:
            return False
        self._seen_bytes = num_bytes
        return True

    @staticmethod
    def _num_bytes() -> int:
        """Return bytes read or written by all threads, mapped pages included (proc(5)); 0 if
        unknown."""
        try:
            fields = dict(line.split(": ") for line in _COUNTERS.read_text().splitlines())
            return sum(int(fields[name]) for name in ("rchar", "wchar", "read_bytes"))
        except (OSError, ValueError, KeyError):
            return 0


def current_collective() -> str | None:
    """Return the collective in which this rank's training waits; None if it is in no collective, or
    if only a GPU waits. Read from the stacks of the main thread and of autograd's threads, which
    Python did not start."""
    main_id = threading.main_thread().ident
    other_python_ids = {thread.ident for thread in threading.enumerate()} - {main_id}
    for thread_id, innermost in sys._current_frames().items():
        if thread_id in other_python_ids:
            continue
        # Collectives of torch call each other: training called the outermost function.
        collective: str | None = None
        frame: FrameType | None = innermost
        while frame is not None:
            file, name = frame.f_code.co_filename, frame.f_code.co_name
            if file.endswith("torch/distributed/distributed_c10d.py"):
                collective = name
            elif "/deepspeed/" in file and name in ("wait", "synchronize") and collective is None:
                collective = "wait"
            frame = frame.f_back
        if collective is not None:
            return collective
    return None
