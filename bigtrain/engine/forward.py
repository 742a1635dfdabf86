"""Forward passes of one rank on a DeepSpeed engine: losses, log-probabilities, scores and logits of
micro-batches, which are copied to the device while the previous one is computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.data.shards.format import IGNORED_LABEL
from bigtrain.engine.optimizers.exact_parameters import ExactParameters
from bigtrain.engine.startup.mesh import Mesh
from bigtrain.models.layers.adapter_names import adapters_off
from bigtrain.models.layers.compilation import uncompiled
from bigtrain.models.layers.document_attention import Isolation
from bigtrain.models.layers.token_loss import (
    NO_TERMS,
    LossTerms,
    TopTokens,
    summed_token_loss,
    token_log_probabilities,
    token_scores,
)
from bigtrain.objectives.losses.passes import ObjectiveLoss
from bigtrain.settings.run_config import MoeSection

if TYPE_CHECKING:
    from bigtrain.models.parallel.sample_parts import SampleParts


class LaterTokens(Protocol):
    """Loss of tokens after the next token (`bigtrain.engine.multi_token`)."""

    def of_batch(self, batch: MicroBatch, inputs: Mapping[str, Any]) -> Any:
        """Return the request for the losses that the forward pass of `batch` computes, too."""

    def weighted(self, losses: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the weighted sum of the requested losses, float32 []."""

    def forget(self) -> None:
        """Forget the losses since the last `read`."""

    def read(self, sum_over_replicas: Callable[[torch.Tensor], torch.Tensor]) -> float:
        """Return the mean loss since the last call. Collective."""


@dataclass(frozen=True)
class ModelOptions:
    """Options of the forward passes of a model and of its loss.

    isolation: of documents. sequence: division of samples into parts, one for each of several
    ranks. computes_loss: whether the model computes the loss of the targets. is_compiled: whether
    layers are compiled. terms: terms of the loss in addition to the cross-entropy. multi_token:
    loss of the layers that predict later tokens. exact: parameters in another dtype than
    DeepSpeed's. unreached: weights that get no gradient in a probe (`ParameterPlan`).
    """

    isolation: Isolation
    objective: ObjectiveLoss
    exact: ExactParameters
    moe: MoeSection
    sequence: SampleParts | None = None
    computes_loss: bool = False
    is_compiled: bool = False
    terms: LossTerms = NO_TERMS
    multi_token: LaterTokens | None = None
    unreached: tuple[str, ...] = ()


class ForwardPasses:
    """Forward passes of one model, without pipeline stages. Collective over the ranks that share
    samples, and with ZeRO 3 over all."""

    def __init__(
        self, engine: Any, device: torch.device, mesh: Mesh, options: ModelOptions
    ) -> None:
        self.engine = engine
        self.device = device
        self.mesh = mesh
        self.isolation = options.isolation
        self.sequence = options.sequence
        self._computes_loss = options.computes_loss
        self.is_compiled = options.is_compiled
        self._terms = options.terms
        self._multi_token = options.multi_token
        self.feed = DeviceFeed(device)

    @property
    def module(self) -> nn.Module:
        """The Hugging Face model; its parameters may be partitioned."""
        module: nn.Module = self.engine.module
        return module

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits of `input_ids` [samples, tokens] in evaluation mode: float32, on the CPU. Every
        rank computes equal logits; all must call it with equal input."""
        return self.read_logits(input_ids, torch.Tensor.float)

    @torch.no_grad()
    def read_logits(
        self, input_ids: torch.Tensor, read: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return the result of `read` on the logits [samples, tokens, vocabulary] of `input_ids` in
        evaluation mode, on the CPU. Collective; the inputs of all ranks have one shape. Ranks
        with one data rank (tensor, sequence, pipeline parallel) have equal inputs."""
        self.engine.eval()
        # The input is not split over the sequence-parallel ranks, and its shape is not the shape
        # of training, for which the layers are compiled.
        unsplit_input = self.sequence.whole_samples() if self.sequence else nullcontext()
        plain_layers = uncompiled() if self.is_compiled else nullcontext()
        with unsplit_input, plain_layers:
            outputs = self.engine(input_ids=self._to_device(input_ids), use_cache=False)
        self.engine.train()
        return read(outputs.logits).cpu()

    def _teacher(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the teacher's log-probabilities and ids for the tokens of this rank."""
        teacher = batch.teacher
        return teacher and (self._part(teacher[0]), self._part(teacher[1]))

    def _part(self, values: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens of `values` [R, T, ...]."""
        return self.sequence.part(values) if self.sequence else values

    def _complete_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of complete rows, of which `values` are this rank's tokens."""
        return self.sequence.whole(values) if self.sequence else values

    def cross_entropy(
        self, batch: MicroBatch, moved: MicroBatch, factor: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Any]:
        """Return the summed loss of this rank's tokens, and the model's outputs. `moved`: `batch`
        on the device; `factor`: by which the caller will multiply the loss."""
        if self._computes_loss:
            # Labels on the host, so that tokens without one are known without waiting.
            targets = self._part(batch.labels)
            teacher = self._teacher(moved)
            loss_inputs: dict[str, Any] = {} if teacher is None else {"teacher": teacher}
            if self._multi_token is not None and torch.is_grad_enabled():
                inputs = self._inputs(batch, moved)
                loss_inputs["further"] = self._multi_token.of_batch(batch, inputs)
            if moved.weights is not None:
                loss_inputs["weights"] = self._part(moved.weights)
            outputs = self._forward(batch, moved, targets=targets, factor=factor, **loss_inputs)
            return outputs.loss, outputs
        outputs = self._forward(batch, moved)
        logits = outputs.logits.flatten(0, 1).float()
        teacher = self._teacher(moved)
        if teacher is not None:
            teacher = teacher[0].flatten(0, 1), teacher[1].flatten(0, 1)
        labels = self._part(moved.labels).flatten()
        weights = None if moved.weights is None else self._part(moved.weights).flatten()
        return summed_token_loss(logits, labels, self._terms, teacher, weights), outputs

    def log_probabilities(self, batch: MicroBatch, moved: MicroBatch) -> tuple[torch.Tensor, Any]:
        """Return the log-probability per target, float32 [R, T], and the model's outputs. Ranks
        that share samples all return complete rows."""
        if self._computes_loss:
            targets = self._part(batch.labels)
            outputs = self._forward(batch, moved, targets=targets, per_token=True)
            return self._complete_rows(outputs.loss), outputs
        outputs = self._forward(batch, moved)
        labels = self._part(moved.labels)
        return self._complete_rows(token_log_probabilities(outputs.logits, labels)), outputs

    def scores(self, batch: MicroBatch, moved: MicroBatch) -> tuple[torch.Tensor, Any]:
        """Return the scores per row at the last token, float32 [R, L], and the model's outputs. A
        row has as many targets as tokens. transformers' class takes the scores at the last token
        that is not the configuration's padding, so the tokens after a row's end are replaced by
        padding. Ranks that share samples have scores of separate parts of a row: the scores of the
        rank with the last token are used."""
        padded = self._padded(moved)
        outputs = self._forward(batch, padded)
        scores = outputs.logits.float()
        if self.sequence is not None:
            ids = padded.input_ids
            positions = torch.arange(ids.shape[-1], device=ids.device)
            last_position = (positions * (ids != self._padding_id)).argmax(-1, keepdim=True)
            is_last = self.sequence.part(positions == last_position)
            # This rank's scores at the last token, if the rank has that token; else zeros.
            placed_scores = torch.where(is_last.unsqueeze(-1), scores.unsqueeze(1), 0.0)
            scores = self.sequence.whole(placed_scores).sum(1)
        return scores, outputs

    @property
    def _padding_id(self) -> int:
        """Token id with which the model's configuration pads."""
        config: Any = self.module.config
        return int(config.get_text_config().pad_token_id)

    def _padded(self, batch: MicroBatch) -> MicroBatch:
        """Return `batch` with the configuration's padding after as many tokens per row as the row
        has targets."""
        labels = batch.labels
        positions = torch.arange(labels.shape[-1], device=labels.device)
        lengths = (labels != IGNORED_LABEL).sum(-1, keepdim=True)
        ids = torch.where(positions < lengths, batch.input_ids, self._padding_id)
        return replace(batch, input_ids=ids, tokens=None)

    @torch.no_grad()
    def token_scores(self, batch: MicroBatch, top: TopTokens | None = None) -> torch.Tensor:
        """Return scores of the targets of `batch` under the current weights, in evaluation mode:
        float32 [R, T, 1 + 2 k] for k `top` tokens, on the CPU, in the order of
        `bigtrain.models.layers.token_loss.token_scores`. Collective over the ranks that share the
        sample, and with ZeRO 3 over all; then every rank brings a batch, of any shape."""
        self.engine.eval()
        length = batch.labels.shape[1]
        # Padding at the end, without targets, makes rows divisible by the ranks that share samples.
        num_padding = self.sequence.padded(length) - length if self.sequence else 0
        if num_padding:
            batch = replace(
                batch,
                input_ids=F.pad(batch.input_ids, (0, num_padding)),
                labels=F.pad(batch.labels, (0, num_padding), value=IGNORED_LABEL),
                tokens=None,
            )
        ((batch, moved),) = self.feed([batch])
        with uncompiled() if self.is_compiled else nullcontext():
            if top is None:
                target_logps, _ = self.log_probabilities(batch, moved)
                scores = target_logps.unsqueeze(-1)
            elif self._computes_loss:
                targets = self._part(batch.labels)
                scores = self._forward(batch, moved, targets=targets, top=top).loss
                scores = self._complete_rows(scores)
            else:
                labels = self._part(moved.labels)
                logits = self._forward(batch, moved).logits.flatten(0, 1).float()
                scores = token_scores(logits, labels.flatten(), top).view(*labels.shape, -1)
                scores = self._complete_rows(scores)
        self.engine.train()
        return scores[:, :length].cpu()

    def row_sums(
        self, batches: Iterable[MicroBatch]
    ) -> Iterator[tuple[MicroBatch, MicroBatch, torch.Tensor]]:
        """Yield every batch of `batches`, its copy on the device, and the log-probability per row
        without dropout, float32 [R]."""
        for batch, moved in self.feed(batches):
            with self.evaluating():
                target_logps, _ = self.log_probabilities(batch, moved)
            yield batch, moved, target_logps.sum(-1)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Let forward passes inside be without dropout."""
        was_training = self.module.training
        self.engine.eval()
        try:
            yield
        finally:
            if was_training:
                self.engine.train()

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Let forward passes inside compute the reference model: without adapters and dropout."""
        with self.evaluating(), adapters_off(self.module):
            yield

    def _forward(self, batch: MicroBatch, moved: MicroBatch, **options: Any) -> Any:
        with self.isolation.document_mask(batch.position_ids):
            return self.engine(**self._inputs(batch, moved), use_cache=False, **options)

    def _inputs(self, batch: MicroBatch, moved: MicroBatch) -> dict[str, Any]:
        if self.sequence is not None:
            positions = (moved.position_ids, batch.position_ids)
            return dict(self.sequence.inputs(moved.input_ids, *positions))
        # Some models flatten the ids with `view`.
        inputs: dict[str, Any] = {"input_ids": moved.input_ids.contiguous()}
        if moved.position_ids is not None:
            # Without an attention mask and a cache, transformers separates documents where
            # positions restart; `models.equivalence` has verified it for this model.
            inputs["position_ids"] = moved.position_ids
        for name, value in self.isolation.arguments(batch.position_ids).items():
            inputs[name] = self._to_device(value) if torch.is_tensor(value) else value
        return inputs

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, non_blocking=True)


@dataclass(frozen=True)
class _DeviceCopy:
    """Copy of a micro-batch on the device, complete when `event` has happened."""

    batch: MicroBatch
    event: torch.cuda.Event


class DeviceFeed:
    """Feed that copies micro-batches to `device`; on CUDA on a separate stream, one micro-batch
    ahead. The host's tensors must be pinned for the copies to overlap (`open_training_data` pins
    them on CUDA); only the computing stream waits for a copy, when it needs the micro-batch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batches: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, MicroBatch]]:
        """Yield pairs of a micro-batch on the host and its copy on the device."""
        if self._stream is None:
            for batch in batches:
                yield batch, batch.moved(lambda tensor: tensor.to(self._device))
            return
        copies: deque[tuple[MicroBatch, _DeviceCopy]] = deque()
        for batch in batches:
            with torch.cuda.stream(self._stream):
                copy = batch.moved(lambda tensor: tensor.to(self._device, non_blocking=True))
                copied = torch.cuda.Event()
                copied.record(self._stream)
            copies.append((batch, _DeviceCopy(copy, copied)))
            if len(copies) > 1:
                yield self._when_copied(*copies.popleft())
        for batch, last_copy in copies:
            yield self._when_copied(batch, last_copy)

    def _when_copied(self, batch: MicroBatch, copy: _DeviceCopy) -> tuple[MicroBatch, MicroBatch]:
        """Return `batch` and its copy on the device; the computing stream waits for the copy."""
        computing = torch.cuda.current_stream(self._device)
        # Not `computing.wait_event`, which is counted as waiting for other ranks
        # (`bigtrain.models.torch_patches.observed_device_waits`).
        copy.event.wait(computing)

        # The copying stream owns the memory: it must not be reused while the computing stream uses
        # the tensors.
        def keep(tensor: torch.Tensor) -> torch.Tensor:
            tensor.record_stream(computing)
            return tensor

        copy.batch.moved(keep)
        return batch, copy.batch
