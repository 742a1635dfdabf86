"""Activation checkpoints in host memory: the inputs of recomputed layers, between the forward and
the backward pass.

Copies run on streams of their own during computation: each input leaves while the next layer
computes, and returns while the layer after it is recomputed. At most one leaves and one returns at
a time, so that the device holds two inputs in addition to that of the layer that computes. Host
memory is pinned and used again. (torch's `save_on_cpu` copies on the compute stream, with new
pinned memory for every tensor; DeepSpeed 0.19.8's `CheckpointHiddenStatesOffload` finds tensors by
identity, and ZeRO-3's hooks pass other ones.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from bigtrain.errors import ModelError
from bigtrain.models.transformers_patches import Checkpoint, replace_checkpoint

_Kind = tuple[torch.Size, torch.dtype]


def offload_checkpoints(model: PreTrainedModel, device_type: str) -> int:
    """Let the checkpointed layers of `model` save their inputs on the host; returns their number.
    Gradient checkpointing must be on. Raises ModelError for a model without such layers."""
    layers: list[Any] = [
        module
        for module in model.modules()
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing
    ]
    if not layers:
        raise ModelError(
            f"model.activation_offload: a {model.config.model_type} has no checkpointed layers of "
            "transformers' kind -> model.activation_offload=false"
        )
    copies = HostCopies(device_type)
    for layer in layers:
        replace_checkpoint(layer, partial(_saving_in, copies))
    return len(layers)


def _saving_in(copies: HostCopies, checkpoint: Checkpoint) -> Checkpoint:
    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # What is saved inside `function` has hooks of the checkpoint's own, which come first.
        with saved_tensors_hooks(copies.pack, copies.unpack):
            return checkpoint(function, *args, **kwargs)

    return run


class HostCopies:
    """Tensors that autograd saves, in host memory. `device_type`: of the tensors that are copied;
    "cpu" copies to other memory of the host, in the same order, without streams."""

    def __init__(self, device_type: str) -> None:
        self._device: Any = torch.get_device_module(device_type)
        self._type = device_type
        self._streams: tuple[Any, Any] | None = None  # out, in: made on the device of the run
        self._leaving: _Kept | None = None
        self._free: dict[_Kind, list[torch.Tensor]] = {}
        self._last: weakref.ref[_Kept] | None = None

    def pack(self, tensor: torch.Tensor) -> _Kept | torch.Tensor:
        """Begin to copy `tensor` to the host; return what `unpack` takes."""
        if tensor.device.type != self._type or isinstance(tensor, torch.nn.Parameter):
            return tensor
        if self._streams is None:
            self._streams = self._device.Stream(), self._device.Stream()
        here, (out, _) = self._device.current_stream(), self._streams
        free = self._free.get((tensor.shape, tensor.dtype))
        host = free.pop() if free else self._new(tensor)
        out.wait_stream(here)  # also for the last reader of `host`: see `_Kept.__del__`
        with self._device.stream(out):
            host.copy_(tensor.detach(), non_blocking=True)
            left = out.record_event()
        kept = _Kept(self, host, tensor.detach(), left, self._last)
        self._last = weakref.ref(kept)
        if self._leaving is not None:
            self._leaving.leave(here)
        self._leaving = kept
        return kept

    def unpack(self, kept: _Kept | torch.Tensor) -> torch.Tensor:
        """Return a tensor on the device, and begin to copy the one that was packed before it."""
        if isinstance(kept, torch.Tensor):
            return kept
        here, self._leaving = self._device.current_stream(), None
        tensor = kept.on_device()
        if tensor is None:
            if kept.returning is None:
                self._fetch(kept, here)
            tensor = kept.arrive(here)
        before = kept.before() if kept.before is not None else None
        if before is not None and before.tensor is None and before.returning is None:
            self._fetch(before, here)
        return tensor

    def _new(self, tensor: torch.Tensor) -> torch.Tensor:
        pins = self._type != "cpu"
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pins)

    def _fetch(self, kept: _Kept, here: Any) -> None:
        """Begin to copy `kept` to the device."""
        assert self._streams is not None
        arriving = self._streams[1]
        # The allocator gives out memory that kernels queued on `here` may still use.
        tensor = torch.empty_like(kept.host, device=kept.device, pin_memory=False)
        arriving.wait_stream(here)
        with self._device.stream(arriving):
            arriving.wait_event(kept.left)
            tensor.copy_(kept.host, non_blocking=True)
            kept.returning = tensor, arriving.record_event()

    def give_back(self, host: torch.Tensor, returning: tuple[torch.Tensor, Any] | None) -> None:
        """Take the host memory of a tensor that autograd has freed, and one that was returning."""
        if returning is not None:
            self._device.current_stream().wait_event(returning[1])
        self._free.setdefault((host.shape, host.dtype), []).append(host)


class _Kept:
    """A tensor in host memory. tensor: on the device, until it has left. left: event after which
    `host` has it. returning: a copy on the device, and the event after which it is complete.
    before: the one packed before it."""

    def __init__(
        self,
        copies: HostCopies,
        host: torch.Tensor,
        tensor: torch.Tensor,
        left: Any,
        before: weakref.ref[_Kept] | None,
    ) -> None:
        self._copies, self.host, self.left, self.before = copies, host, left, before
        self.tensor: torch.Tensor | None = tensor
        self.device, self._version = tensor.device, tensor._version
        self.returning: tuple[torch.Tensor, Any] | None = None

    def on_device(self) -> torch.Tensor | None:
        """Return the tensor if it has not left. Raises RuntimeError if it was changed since."""
        if self.tensor is not None and self.tensor._version != self._version:
            raise RuntimeError(
                "an operation has written into the input of a recomputed layer, which the backward "
                "pass needs"
            )
        return self.tensor

    def leave(self, here: Any) -> None:
        """Free the tensor on the device. The allocator gives its memory to kernels of `here`."""
        if self.on_device() is not None:
            here.wait_event(self.left)
            self.tensor = None

    def arrive(self, here: Any) -> torch.Tensor:
        """Return the copy on the device, for kernels of `here`."""
        assert self.returning is not None
        (tensor, complete), self.returning = self.returning, None
        here.wait_event(complete)
        return tensor

    def __del__(self) -> None:
        # Every reader of `host` is then before what the current stream does next.
        self._copies.give_back(self.host, self.returning)
