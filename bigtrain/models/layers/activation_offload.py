"""Activation checkpoints in host memory: the inputs of recomputed layers, between the forward and
the backward pass.

Copies run on separate streams during computation: each input leaves while the next layer computes,
and returns while the following layer is recomputed. At most one input leaves and one returns at a
time, so that the device holds two inputs in addition to the input of the layer that computes. Host
memory is pinned and used again. (torch's `save_on_cpu` copies on the compute stream, with new
pinned memory for every tensor; DeepSpeed 0.19.8's `CheckpointHiddenStatesOffload` finds tensors by
identity, and ZeRO-3's hooks pass other tensors.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from bigtrain.errors import ModelError
from bigtrain.models.transformers_patches import Checkpoint, replace_checkpoint

_BufferKey = tuple[torch.Size, torch.dtype]


def offload_checkpoints(model: PreTrainedModel, device_type: str) -> int:
    """Let the checkpointed layers of `model` save their inputs on the host; returns their number.
    Gradient checkpointing must be on. Raises ModelError for a model without checkpointed layers."""
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
        replace_checkpoint(layer, copies.save_inputs)
    return len(layers)


class HostCopies:
    """Tensors that autograd saves, in host memory. `device_type`: of the tensors that are copied;
    "cpu" copies to other memory of the host, in that order, without streams."""

    def __init__(self, device_type: str) -> None:
        self._device: Any = torch.get_device_module(device_type)
        self._type = device_type
        self._streams: tuple[Any, Any] | None = None  # out, in: made on the device of the run
        self._leaving: _SavedTensor | None = None
        self._free: dict[_BufferKey, list[torch.Tensor]] = {}
        self._last: weakref.ref[_SavedTensor] | None = None

    def save_inputs(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return `checkpoint` with its inputs saved on the host."""

        def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            # Tensors saved inside `function` have the checkpoint's hooks, which come first.
            with saved_tensors_hooks(self.pack, self.unpack):
                return checkpoint(function, *args, **kwargs)

        return run

    def pack(self, tensor: torch.Tensor) -> _SavedTensor | torch.Tensor:
        """Begin to copy `tensor` to the host; return what `unpack` takes."""
        if tensor.device.type != self._type or isinstance(tensor, torch.nn.Parameter):
            return tensor
        if self._streams is None:
            self._streams = self._device.Stream(), self._device.Stream()
        stream, (out, _) = self._device.current_stream(), self._streams
        free = self._free.get((tensor.shape, tensor.dtype))
        host = free.pop() if free else self._new(tensor)
        out.wait_stream(stream)  # also for the last reader of `host`: see `_SavedTensor.__del__`
        with self._device.stream(out):
            host.copy_(tensor.detach(), non_blocking=True)
            copied = out.record_event()
        saved = _SavedTensor(self, host, tensor.detach(), copied, self._last)
        self._last = weakref.ref(saved)
        if self._leaving is not None:
            self._leaving.leave(stream)
        self._leaving = saved
        return saved

    def unpack(self, packed: _SavedTensor | torch.Tensor) -> torch.Tensor:
        """Return a tensor on the device, and begin to copy the tensor that was packed before."""
        if isinstance(packed, torch.Tensor):
            return packed
        stream, self._leaving = self._device.current_stream(), None
        tensor = packed.on_device()
        if tensor is None:
            if packed.returning is None:
                self._fetch(packed, stream)
            tensor = packed.arrive(stream)
        previous = packed.previous() if packed.previous is not None else None
        if previous is not None and previous.tensor is None and previous.returning is None:
            self._fetch(previous, stream)
        return tensor

    def _new(self, tensor: torch.Tensor) -> torch.Tensor:
        pins = self._type != "cpu"
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pins)

    def _fetch(self, saved: _SavedTensor, stream: Any) -> None:
        """Begin to copy `saved` to the device."""
        assert self._streams is not None
        arriving = self._streams[1]
        # The allocator gives out memory that kernels queued on `stream` may still use.
        tensor = torch.empty_like(saved.host, device=saved.device, pin_memory=False)
        arriving.wait_stream(stream)
        with self._device.stream(arriving):
            arriving.wait_event(saved.copied)
            tensor.copy_(saved.host, non_blocking=True)
            saved.returning = tensor, arriving.record_event()

    def give_back(self, host: torch.Tensor, returning: tuple[torch.Tensor, Any] | None) -> None:
        """Take the host memory of a tensor that autograd has freed; `returning`: its unread
        copy."""
        if returning is not None:
            self._device.current_stream().wait_event(returning[1])
        self._free.setdefault((host.shape, host.dtype), []).append(host)


class _SavedTensor:
    """A tensor in host memory. tensor: on the device, until its memory is freed. copied: event
    after which `host` is complete. returning: a copy on the device, and the event after which the
    copy is complete. previous: the tensor packed before."""

    def __init__(
        self,
        copies: HostCopies,
        host: torch.Tensor,
        tensor: torch.Tensor,
        copied: Any,
        previous: weakref.ref[_SavedTensor] | None,
    ) -> None:
        self._copies, self.host, self.copied, self.previous = copies, host, copied, previous
        self.tensor: torch.Tensor | None = tensor
        self.device, self._version = tensor.device, tensor._version
        self.returning: tuple[torch.Tensor, Any] | None = None

    def on_device(self) -> torch.Tensor | None:
        """Return the tensor if it is still there. Raises RuntimeError if it was changed since."""
        if self.tensor is not None and self.tensor._version != self._version:
            raise RuntimeError(
                "an operation has written into the input of a recomputed layer, which the backward "
                "pass needs"
            )
        return self.tensor

    def leave(self, stream: Any) -> None:
        """Free the tensor on the device. The allocator gives its memory to kernels of `stream`."""
        if self.on_device() is not None:
            stream.wait_event(self.copied)
            self.tensor = None

    def arrive(self, stream: Any) -> torch.Tensor:
        """Return the copy on the device, for kernels of `stream`."""
        assert self.returning is not None
        (tensor, complete), self.returning = self.returning, None
        stream.wait_event(complete)
        return tensor

    def __del__(self) -> None:
        # The current stream has passed every reader of `host`.
        self._copies.give_back(self.host, self.returning)
