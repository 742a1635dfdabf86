"""Pipeline stage of one rank, as the module that DeepSpeed's schedule drives.

Stages exchange flat tuples of tensors. DeepSpeed sends a gradient back for every floating-point
tensor, into buffers numbered by position (0.19.8, runtime/pipe/engine.py). So differentiable
tensors come first, and other floating-point tensors are sent as integers with equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import ProcessTopology
from torch import nn

from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.models.layers.document_attention import Isolation
from bigtrain.models.layers.token_loss import Teacher
from bigtrain.models.parallel.stage_layout import map_tensors, tensors_in
from bigtrain.models.parallel.stages import Payload, Stage


class StageModule(nn.Module):
    """Stage as DeepSpeed calls it: from token ids, or the tensors of the previous stage, to
    tensors. Other parts of a micro-batch come from `feed`: every stage reads these few kilobytes
    from the dataset. computes_loss: whether the last stage's model returns the loss instead of
    logits; per_token: the loss of each token, for an objective."""

    def __init__(
        self,
        stage: Stage,
        device: torch.device,
        isolation: Isolation,
        *,
        computes_loss: bool,
        per_token: bool = False,
    ) -> None:
        super().__init__()
        self.stage = stage
        self.isolation = isolation
        self.computes_loss, self.per_token = computes_loss, per_token
        self.incoming: P2PLayout | None = None
        self.outgoing: P2PLayout | None = None
        self._device = device
        self._batches: Iterator[MicroBatch] = iter(())
        self._factor: torch.Tensor | None = None
        self._added: Callable[[Any], torch.Tensor | None] = lambda _: None

    def feed(
        self,
        batches: Iterable[MicroBatch],
        factor: torch.Tensor | None = None,
        added: Callable[[Any], torch.Tensor | None] | None = None,
    ) -> None:
        """Set the micro-batches of the next forward passes, in order; `factor`: as for a
        `ChunkedLoss`; `added`: returns the router loss of the outputs of the last stage's model."""
        self._batches, self._factor = iter(batches), factor
        self._added = added or (lambda _: None)  # no router loss in evaluation

    def forward(self, received: torch.Tensor | tuple[torch.Tensor, ...]) -> Any:
        """Return logits or the summed loss, and the router loss if there is one, on the last stage;
        on other stages the tensors to send."""
        batch = next(self._batches)
        if self.incoming is None:
            assert torch.is_tensor(received)
            payload, input_ids = None, received
        else:
            tensors = (received,) if torch.is_tensor(received) else received
            payload, input_ids = self.incoming.unpack(tensors), batch.input_ids
        # Arguments of the last stage's `ChunkedLoss`.
        loss_inputs: dict[str, Any] = {}
        if self.computes_loss:
            loss_inputs["targets"] = batch.labels
            if self.per_token:
                loss_inputs["per_token"] = True
            elif self._factor is not None:
                loss_inputs["factor"] = self._factor
            if batch.teacher is not None:
                loss_inputs["teacher"] = self.teacher(batch)
            if batch.weights is not None and not self.per_token:
                loss_inputs["weights"] = self.weights(batch)
        outputs = self.run(payload, input_ids, batch.position_ids, **loss_inputs)
        sent = outputs if self.outgoing is None else self.outgoing.pack(outputs)
        # DeepSpeed sends back a gradient for every received tensor, so every one must have one.
        if self.incoming is not None and self.incoming.num_differentiable > 1:
            dependencies = tensors[1 : self.incoming.num_differentiable]
            sent = (touch(sent[0], dependencies), *sent[1:])
        return sent if len(sent) > 1 else sent[0]

    def teacher(self, batch: MicroBatch) -> Teacher | None:
        """Return the teacher's log-probabilities and token ids of a micro-batch, on the device."""
        teacher = batch.teacher
        return teacher and (teacher[0].to(self._device), teacher[1].to(self._device))

    def weights(self, batch: MicroBatch) -> torch.Tensor | None:
        """Return the weights of the losses of a micro-batch, on the device."""
        return None if batch.weights is None else batch.weights.to(self._device, non_blocking=True)

    def run(
        self,
        payload: Payload | None,
        input_ids: torch.Tensor,
        positions: torch.Tensor | None,
        **loss_inputs: Any,
    ) -> Any:
        """Return a Payload; on the last stage a tuple of the logits (or of the summed loss, if
        `loss_inputs` has arguments for a `ChunkedLoss`) and of the router loss, if any.
        `positions`: on the host."""
        if self.stage.needs_tokens:
            input_ids = input_ids.to(self._device, non_blocking=True).contiguous()
        moved = None if positions is None else positions.to(self._device, non_blocking=True)
        with self.isolation.document_mask(positions):
            outputs = self.stage(payload, input_ids, moved, **loss_inputs)
        if not self.stage.is_last:
            # DeepSpeed sends a gradient back to this stage in any case. If all parameters so far
            # are frozen, no output requires a gradient: make some that do.
            tensors = tensors_in((outputs.outputs, outputs.shared, outputs.router_logits))
            if torch.is_grad_enabled() and not any(tensor.requires_grad for tensor in tensors):
                differentiable = map_tensors(
                    lambda t: t.detach().requires_grad_() if t.is_floating_point() else t,
                    outputs.outputs,
                )
                return replace(outputs, outputs=differentiable)
            return outputs
        values = outputs.loss if loss_inputs else outputs.logits
        router_loss = self._added(outputs)
        return (values,) if router_loss is None else (values, router_loss)


class StagesModule(PipelineModule):  # type: ignore[misc]
    """DeepSpeed's module with one "layer" per stage; only the layer of this rank's stage computes
    something."""

    def __init__(self, stage: StageModule, topology: ProcessTopology) -> None:
        num_stages = topology.get_dim("pipe")
        layers: list[nn.Module] = [nn.Identity() for _ in range(num_stages)]
        layers[stage.stage.index] = stage
        super().__init__(layers=layers, topology=topology, partition_method="uniform")


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class _Slot:
    """Placeholder for a tensor of a payload. number: index among the differentiable tensors, or
    among the other tensors."""

    number: int
    differentiable: bool
    dtype: torch.dtype


@dataclass(frozen=True)
class P2PLayout:
    """Layout of the payloads between two stages, equal for all micro-batches. form: a payload with
    slots instead of tensors."""

    form: Payload
    num_differentiable: int

    @staticmethod
    def of(payload: Payload) -> P2PLayout:
        """Return the layout of payloads like this one, computed with gradients enabled."""
        counts = {True: 0, False: 0}

        def slot(tensor: torch.Tensor) -> _Slot:
            is_differentiable = tensor.requires_grad
            counts[is_differentiable] += 1
            return _Slot(counts[is_differentiable] - 1, is_differentiable, tensor.dtype)

        return P2PLayout(payload.map(slot), counts[True])

    def pack(self, payload: Payload) -> tuple[torch.Tensor, ...]:
        """Return the tensors of `payload`, differentiable tensors first. `payload` must have this
        layout's form."""
        differentiable: list[torch.Tensor] = []
        integers: list[torch.Tensor] = []
        slots = iter(_slots(self.form))

        def append(tensor: torch.Tensor) -> None:
            if next(slots).differentiable:
                differentiable.append(tensor.contiguous())
            else:
                content = tensor.detach().contiguous()
                if content.is_floating_point() or content.dtype == torch.bool:
                    content = content.view(_INTEGERS[content.element_size()])
                integers.append(content)

        payload.map(append)
        return (*differentiable, *integers)

    def unpack(self, tensors: tuple[torch.Tensor, ...]) -> Payload:
        """Return the payload from which `pack` has made `tensors`."""

        def fill(value: Any) -> Any:
            """Return a copy of a part of the form with tensors instead of slots."""
            if isinstance(value, _Slot):
                if value.differentiable:
                    return tensors[value.number]
                tensor = tensors[self.num_differentiable + value.number]  # as integers
                return tensor if tensor.dtype == value.dtype else tensor.view(value.dtype)
            if isinstance(value, dict):
                return {key: fill(item) for key, item in value.items()}
            return tuple(fill(item) for item in value) if isinstance(value, tuple) else value

        form = self.form
        return Payload(fill(form.outputs), fill(form.shared), fill(form.router_logits))


def _slots(form: Any) -> list[_Slot]:
    if isinstance(form, Payload):
        return _slots((form.outputs, form.shared, form.router_logits))
    if isinstance(form, _Slot):
        return [form]
    items = tuple(form.values()) if isinstance(form, dict) else form
    if not isinstance(items, tuple):
        return []
    return [slot for item in items for slot in _slots(item)]


class _Touch(torch.autograd.Function):
    """Identity on `first`, with a gradient of zeros for `dependencies`."""

    @staticmethod
    def forward(ctx: Any, first: torch.Tensor, *dependencies: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*dependencies)
        return first.view_as(first)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (gradients[0], *(torch.zeros_like(dependency) for dependency in ctx.saved_tensors))


def touch(first: torch.Tensor, dependencies: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return `first`, which depends on `dependencies` without using their values, so that each of
    these tensors gets a gradient."""
    result: torch.Tensor = _Touch.apply(first, *dependencies)  # type: ignore[no-untyped-call]
    return result
