"""The stage of one rank, as the module that the schedule of DeepSpeed drives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import ProcessTopology
from torch import nn

from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.engine.pipeline.stage_payload import P2PLayout, touch
from bigtrain.models.layers.isolation import Isolation
from bigtrain.models.parallel.stages import Payload, Stage


class StageModule(nn.Module):
    """A stage as DeepSpeed calls it: token ids or the previous stage's tensors in, tensors out.

    The rest of a micro-batch (positions, and token ids where layers need them) comes from `feed`:
    every stage reads the same few kilobytes from the dataset instead of passing them on.

    computes_loss: whether the last stage's model returns the loss instead of logits.
    """

    def __init__(
        self, stage: Stage, device: torch.device, isolation: Isolation, *, computes_loss: bool
    ) -> None:
        super().__init__()
        self.stage = stage
        self.isolation = isolation
        self.computes_loss = computes_loss
        self.incoming: P2PLayout | None = None
        self.outgoing: P2PLayout | None = None
        self._device = device
        self._batches: Iterator[MicroBatch] = iter(())
        self._factor: torch.Tensor | None = None
        self._added: Callable[[Any], torch.Tensor | None] = _nothing

    def feed(
        self,
        batches: Iterable[MicroBatch],
        factor: torch.Tensor | None = None,
        added: Callable[[Any], torch.Tensor | None] | None = None,
    ) -> None:
        """The micro-batches of the forward passes to come, in order; `factor` as for a
        `ChunkedLoss`; `added`: what routers add to the loss, of what the last stage's model
        returned."""
        self._batches, self._factor = iter(batches), factor
        self._added = added or _nothing

    def forward(self, received: torch.Tensor | tuple[torch.Tensor, ...]) -> Any:
        """The last stage returns logits or the summed loss, and the router loss if there is one;
        other stages return the tensors to send."""
        batch = next(self._batches)
        if self.incoming is None:
            assert torch.is_tensor(received)
            payload, input_ids = None, received
        else:
            tensors = (received,) if torch.is_tensor(received) else received
            payload, input_ids = self.incoming.unpack(tensors), batch.input_ids
        loss = {}
        if self.computes_loss:
            loss["targets"] = batch.labels
            if self._factor is not None:
                loss["factor"] = self._factor
        outputs = self.run(payload, input_ids, batch.position_ids, **loss)
        sent = outputs if self.outgoing is None else self.outgoing.pack(outputs)
        if self.incoming is not None and self.incoming.num_differentiable > 1:
            others = tensors[1 : self.incoming.num_differentiable]
            sent = (touch(sent[0], others), *sent[1:])
        return sent if len(sent) > 1 else sent[0]

    def run(
        self,
        payload: Payload | None,
        input_ids: torch.Tensor,
        positions: torch.Tensor | None,
        **loss: torch.Tensor,
    ) -> Any:
        """A Payload, or the last stage's logits (with arguments for a `ChunkedLoss`, its summed
        loss) and the router loss. `positions` are on the host."""
        if self.stage.needs_tokens:
            input_ids = input_ids.to(self._device, non_blocking=True).contiguous()
        moved = None if positions is None else positions.to(self._device, non_blocking=True)
        with self.isolation.document_mask(positions):
            outputs = self.stage(payload, input_ids, moved, **loss)
        if not self.stage.is_last:
            return _with_gradient(outputs) if torch.is_grad_enabled() else outputs
        answer = outputs.loss if loss else outputs.logits
        added = self._added(outputs)
        return (answer,) if added is None else (answer, added)


class StagesModule(PipelineModule):  # type: ignore[misc]
    """DeepSpeed's module with one "layer" per stage, of which this rank has its own."""

    def __init__(self, stage: StageModule, topology: ProcessTopology) -> None:
        num_stages = topology.get_dim("pipe")
        layers: list[nn.Module] = [nn.Identity() for _ in range(num_stages)]
        layers[stage.stage.index] = stage
        super().__init__(layers=layers, topology=topology, partition_method="uniform")


def _nothing(_outputs: Any) -> None:
    """The router loss in evaluation: none."""


def _with_gradient(payload: Payload) -> Payload:
    """`payload` with at least one tensor that requires a gradient, which DeepSpeed always sends
    back.

    If all parameters up to here are frozen, no tensor requires one by itself.
    """
    asked = False

    def look(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal asked
        asked |= tensor.requires_grad
        return tensor

    def ask(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor

    payload.map(look)
    return payload if asked else replace(payload, outputs=payload.map(ask).outputs)
