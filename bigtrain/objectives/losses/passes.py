"""Interface between an engine and the loss of an objective, and base classes of losses.

A loss is summed over the units of a micro-batch (target tokens, rows, pairs, answers); the engine
divides by the units of the global batch, so that a step does not depend on micro-batches and ranks.
`bigtrain.objectives.losses.next_token` leaves the cross-entropy, and the divergence from a teacher,
to the engine; all other losses get the log-probabilities of the target tokens, which
`bigtrain.models.layers.chunked_loss` computes without full logits, or scores.

Shapes: R = rows of a micro-batch (of pairs: chosen and rejected alternate; of rated answers: the
answer and a mismatched one), T = tokens of a row.
"""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.data.shards.format import IGNORED_LABEL
from bigtrain.metrics.recording import record, recording_if
from bigtrain.objectives.kind import ObjectiveKind
from bigtrain.objectives.losses.objective_batch import ObjectiveBatch
from bigtrain.objectives.section import ObjectiveSection

Summed = tuple[torch.Tensor, Any]
"""Loss summed over the units of a micro-batch, float32 [], and all else that the model returned."""
Factor = torch.Tensor | None
"""Number that a loss is going to be multiplied by."""


class Passes(Protocol):
    """Forward passes of the model that an engine offers an objective. Collective over the ranks
    that share the sample. `moved` is `batch` on the device. reports_loss: whether this rank reports
    the loss; one of the ranks that compute an equal loss does."""

    @property
    def reports_loss(self) -> bool: ...
    def cross_entropy(self, batch: MicroBatch, moved: MicroBatch, factor: Factor) -> Summed: ...
    def log_probabilities(
        self, batch: MicroBatch, moved: MicroBatch
    ) -> tuple[torch.Tensor, Any]: ...
    def scores(self, batch: MicroBatch, moved: MicroBatch) -> tuple[torch.Tensor, Any]: ...
    def row_sums(
        self, batches: Iterable[MicroBatch]
    ) -> Iterator[tuple[MicroBatch, MicroBatch, torch.Tensor]]:
        """Yield every batch, its copy on the device, and the log-probability of the batch's rows
        without dropout, float32 [R]; nothing on ranks of other stages than the last."""

    def reference(self) -> AbstractContextManager[None]: ...
    def sum_over_replicas(self, values: torch.Tensor) -> torch.Tensor: ...


class ObjectiveLoss(ABC):
    """Loss of a run."""

    def __init__(self, objective: ObjectiveKind[Any]) -> None:
        self.objective = objective

    def prepare(self, passes: Passes, batches: Iterable[MicroBatch]) -> Iterable[MicroBatch]:
        """Compute what the losses of `batches` have in common, and return `batches`: this rank's
        micro-batches of a step or of an evaluation. Collective over all ranks."""
        return batches

    def count(self, labels: torch.Tensor) -> int:
        """Return the units of `labels` int64 [R, T], on the host."""
        targets = labels != IGNORED_LABEL
        if self.objective.unit == "tokens":
            return int(targets.sum())
        units = pairs_present(labels) if self.objective.unit == "pairs" else targets.any(-1)
        return int(units.sum())

    def trained(self, batch: MicroBatch) -> MicroBatch:
        """Return the rows of `batch` that `summed_loss` passes through the model."""
        return batch

    @abstractmethod
    def summed_loss(
        self, passes: Passes, batch: MicroBatch, moved: MicroBatch, factor: Factor = None
    ) -> Summed:
        """Return the loss of a micro-batch; `moved` is `batch` on the device."""


class LogProbabilityLoss(ObjectiveLoss):
    """Base of losses that are a function of log-probabilities."""

    @abstractmethod
    def loss(self, batch: ObjectiveBatch) -> torch.Tensor:
        """Return the loss of `batch`, summed over units, float32 []."""

    def summed_loss(
        self, passes: Passes, batch: MicroBatch, moved: MicroBatch, factor: Factor = None
    ) -> Summed:
        # Log-probabilities under the reference: stored sums of rows, or of a pass without gradient.
        reference, sums = None, moved.reference
        if self.objective.needs_reference and sums is None:
            reference = reference_log_probabilities(passes, batch, moved)
            sums = reference.sum(-1)
        log_probabilities, outputs = passes.log_probabilities(batch, moved)
        targets = moved.labels != IGNORED_LABEL
        with recording_if(passes.reports_loss):
            num_units = self.count(batch.labels)
            loss = self.loss(
                ObjectiveBatch(log_probabilities, targets, moved.labels, reference, sums, num_units)
            )
        return loss, outputs


def make_objective(section: ObjectiveSection) -> ObjectiveLoss:
    """Return the loss of a run. Raises ExtensionError if a class of the user fails."""
    objective = section.kind
    loss: ObjectiveLoss = pkgutil.resolve_name(objective.loss)(objective)
    return loss


@torch.no_grad()
def reference_log_probabilities(
    passes: Passes, batch: MicroBatch, moved: MicroBatch
) -> torch.Tensor:
    """Return the log-probabilities of the targets under the reference model, float32 [R, T]."""
    with passes.reference():
        return passes.log_probabilities(batch, moved)[0]


def reference_sums(passes: Passes, batch: MicroBatch, moved: MicroBatch) -> torch.Tensor:
    """Return the log-probability per row under the reference model, float32 [R]: the stored
    log-probability, if there is one."""
    if moved.reference is not None:
        return moved.reference
    return reference_log_probabilities(passes, batch, moved).sum(-1)


def pairs_present(labels: torch.Tensor) -> torch.Tensor:
    """Return which pairs of rows of `labels` [R, T] are not padding: bool [R / 2]."""
    has_target = (labels != IGNORED_LABEL).any(-1)
    return has_target[0::2] & has_target[1::2]


def record_rewards(
    chosen_rewards: torch.Tensor,
    rejected_rewards: torch.Tensor,
    present: torch.Tensor,
    num_present: int,
) -> None:
    """Record the mean rewards of pairs under TRL's names for preferences. present: bool [pairs],
    False for padding; num_present: pairs that are not padding."""
    record_mean("rewards/chosen", chosen_rewards, present, num_present)
    record_mean("rewards/rejected", rejected_rewards, present, num_present)
    record_mean("rewards/margins", chosen_rewards - rejected_rewards, present, num_present)
    is_right = (chosen_rewards > rejected_rewards).float()
    record_mean("rewards/accuracies", is_right, present, num_present)


def record_mean(name: str, values: torch.Tensor, present: torch.Tensor, num_present: int) -> None:
    """Record the mean of `values` [N] without padding; nothing if all is padding. present: bool
    [N]; num_present: how many are True, counted on the host, which does not wait for the device."""
    if num_present:
        record(name, (values * present).sum() / num_present, weight=float(num_present))
