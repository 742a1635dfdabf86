"""Objectives: the loss of a micro-batch, what it is a mean of, and metrics.

An objective returns the loss summed over the units of a micro-batch (target tokens, rows, pairs,
answers); the engine divides by the units of the global batch, so that a step does not depend on
micro-batches and ranks. `NextToken` leaves the cross-entropy, and the divergence from a teacher, to
the engine; all other objectives get the log-probabilities of the target tokens, which
`bigtrain.models.layers.chunked_loss` computes without full logits.

Shapes: R = rows of a micro-batch (of pairs: chosen and rejected alternate; of rated answers: the
answer and a mismatched one), T = tokens of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.data.shards.format import IGNORED_LABEL
from bigtrain.engine.objective_batch import ObjectiveBatch
from bigtrain.errors import ExtensionError
from bigtrain.metrics.recording import record, recording_if
from bigtrain.models.layers.token_loss import LossTerms
from bigtrain.settings.extensions import describe, import_named, location
from bigtrain.settings.objective import Unit, compares_with_reference, unit_of
from bigtrain.settings.run_config import RunConfig
from bigtrain.settings.sections.extensions import is_imported
from bigtrain.settings.sections.objective import ObjectiveSection


class Passes(Protocol):
    """Forward passes of the model that an engine offers an objective. Collective over the ranks
    that share the sample. `moved` is `batch` on the device. reports_loss: whether this rank reports
    the loss; one of the ranks that compute an equal loss does."""

    @property
    def reports_loss(self) -> bool: ...
    def cross_entropy(
        self, batch: MicroBatch, moved: MicroBatch, factor: torch.Tensor | None
    ) -> tuple[torch.Tensor, Any]: ...
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


class Objective(Protocol):
    """Loss of a run."""

    def prepare(self, passes: Passes, batches: Iterable[MicroBatch]) -> Iterable[MicroBatch]:
        """Compute what the losses of `batches` have in common, and return `batches`: this rank's
        micro-batches of a step or of an evaluation. Collective over all ranks."""

    def count(self, labels: torch.Tensor) -> int:
        """Return the units of `labels` int64 [R, T], on the host."""

    def trained(self, batch: MicroBatch) -> MicroBatch:
        """Return the rows of `batch` that `summed_loss` passes through the model."""

    def summed_loss(
        self,
        passes: Passes,
        batch: MicroBatch,
        moved: MicroBatch,
        factor: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Any]:
        """Return the loss summed over the units of a micro-batch, float32 [], and all else that the
        model returned. `factor`: what the loss is going to be multiplied by."""


class LaterTokens(Protocol):
    """Loss of later tokens than the next (`bigtrain.engine.multi_token`)."""

    def of_batch(self, batch: MicroBatch, inputs: Mapping[str, Any]) -> Any:
        """Return what the forward pass of `batch` is asked to compute in addition."""

    def weighted(self, losses: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the weighted sum of what it computed, float32 []."""

    def forget(self) -> None:
        """Forget the losses since the last `read`."""

    def read(self, sum_over_replicas: Callable[[torch.Tensor], torch.Tensor]) -> float:
        """Return the mean loss since the last call. Collective."""


class _Unprepared:
    """Base of objectives whose micro-batches are independent."""

    def prepare(self, passes: Passes, batches: Iterable[MicroBatch]) -> Iterable[MicroBatch]:
        return batches

    def trained(self, batch: MicroBatch) -> MicroBatch:
        return batch


class NextToken(_Unprepared):
    """Cross-entropy of the next token."""

    def count(self, labels: torch.Tensor) -> int:
        return int((labels != IGNORED_LABEL).sum())

    def summed_loss(
        self,
        passes: Passes,
        batch: MicroBatch,
        moved: MicroBatch,
        factor: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Any]:
        return passes.cross_entropy(batch, moved, factor)


class OfLogProbabilities(_Unprepared):
    """Objective that is a function of log-probabilities. `loss`: of an `ObjectiveBatch`, summed
    over the units of the micro-batch."""

    def __init__(
        self,
        loss: Callable[[ObjectiveBatch], torch.Tensor],
        unit: Unit,
        *,
        needs_reference: bool = False,
    ) -> None:
        self._loss, self._unit = loss, unit
        self._needs_reference = needs_reference

    def count(self, labels: torch.Tensor) -> int:
        targets = labels != IGNORED_LABEL
        if self._unit == "tokens":
            return int(targets.sum())
        units = _pairs_present(labels) if self._unit == "pairs" else targets.any(-1)
        return int(units.sum())

    def summed_loss(
        self,
        passes: Passes,
        batch: MicroBatch,
        moved: MicroBatch,
        factor: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Any]:
        reference, sums = None, moved.reference
        if self._needs_reference and sums is None:
            reference = _reference_log_probabilities(passes, batch, moved)
            sums = reference.sum(-1)
        values, outputs = passes.log_probabilities(batch, moved)
        targets = moved.labels != IGNORED_LABEL
        with recording_if(passes.reports_loss):
            loss = self._loss(ObjectiveBatch(values, targets, moved.labels, reference, sums))
        return loss, outputs


class Preference:
    """Losses of pairs of answers: `sigmoid` (DPO), `ipo`, `simpo`, `orpo`."""

    def __init__(self, section: ObjectiveSection) -> None:
        self._section = section
        self._loss_of: Callable[[_Pairs], torch.Tensor] = getattr(self, f"_{section.loss}")

    def loss(self, batch: ObjectiveBatch) -> torch.Tensor:
        """Return the summed loss, and record rewards as TRL does."""
        pairs = _Pairs(batch)
        losses = self._loss_of(pairs)
        rewards = self._section.beta * self._reward(batch).detach()
        chosen_rewards, rejected_rewards = rewards[0::2], rewards[1::2]
        weights = pairs.present.float()
        count = float(len(losses))
        _record_rewards(chosen_rewards, rejected_rewards, weights)
        for name, values in (
            ("logps/chosen", batch.row_sums.detach()[0::2]),
            ("logps/rejected", batch.row_sums.detach()[1::2]),
        ):
            record(name, (values * weights).mean(), weight=count)
        return (losses * weights).sum()

    def _reward(self, batch: ObjectiveBatch) -> torch.Tensor:
        if batch.reference_sums is not None:
            return batch.row_sums - batch.reference_sums
        return batch.row_means

    def _sigmoid(self, pairs: _Pairs) -> torch.Tensor:
        # DPO (arXiv 2305.18290, equation 7): -log sigma(beta (r_chosen - r_rejected)), where r is
        # the log ratio to the reference.
        return -F.logsigmoid(self._section.beta * pairs.difference(self._reward(pairs.batch)))

    def _ipo(self, pairs: _Pairs) -> torch.Tensor:
        # IPO (arXiv 2310.12036, equation 17): (difference of log ratios - 1 / (2 beta))^2, of means
        # per token as in TRL.
        means = self._reward(pairs.batch) / pairs.batch.row_lengths.clamp(min=1)
        return (pairs.difference(means) - 1 / (2 * self._section.beta)) ** 2

    def _simpo(self, pairs: _Pairs) -> torch.Tensor:
        # SimPO (arXiv 2405.14734, equation 6): -log sigma(beta (m_chosen - m_rejected) - gamma),
        # where m is the mean log-probability per token.
        margin = self._section.beta * pairs.difference(pairs.batch.row_means)
        return -F.logsigmoid(margin - self._section.gamma)

    def _orpo(self, pairs: _Pairs) -> torch.Tensor:
        # ORPO (arXiv 2403.07691, equations 6 and 7): -log p - beta log sigma(log odds ratio), with
        # odds p / (1 - p) and the mean log-probability per token as log p.
        means = pairs.batch.row_means
        log_odds = pairs.difference(means - _log1mexp(means))
        return -means[0::2] - self._section.beta * F.logsigmoid(log_odds)


class Reward(_Unprepared):
    """Loss of a model that scores answers: that the chosen one of a pair has the higher score
    (Bradley and Terry; as in TRL's RewardTrainer)."""

    def __init__(self, section: ObjectiveSection) -> None:
        self._centering = section.center_rewards_coefficient

    def count(self, labels: torch.Tensor) -> int:
        return int(_pairs_present(labels).sum())

    def summed_loss(
        self,
        passes: Passes,
        batch: MicroBatch,
        moved: MicroBatch,
        factor: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Any]:
        scores, outputs = passes.scores(batch, moved)
        chosen_scores, rejected_scores = scores[0::2, 0], scores[1::2, 0]
        # -log sigma(r_chosen - r_rejected) (Bradley and Terry 1952) leaves the center of scores
        # open: c (r_chosen + r_rejected)^2 sets it (Eisenstein et al. 2023, arXiv 2312.09244).
        losses = -F.logsigmoid(chosen_scores - rejected_scores)
        losses = losses + self._centering * (chosen_scores + rejected_scores) ** 2
        weights = _pairs_present(moved.labels).float()
        _record_rewards(chosen_scores.detach(), rejected_scores.detach(), weights)
        return (losses * weights).sum(), outputs


class Classification(_Unprepared):
    """Cross-entropy of the label of a sample."""

    def count(self, labels: torch.Tensor) -> int:
        return int((labels != IGNORED_LABEL).any(-1).sum())

    def summed_loss(
        self,
        passes: Passes,
        batch: MicroBatch,
        moved: MicroBatch,
        factor: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Any]:
        scores, outputs = passes.scores(batch, moved)
        assert moved.classes is not None
        weights = (moved.labels != IGNORED_LABEL).any(-1).float()
        losses = F.cross_entropy(scores, moved.classes, reduction="none")
        correct = (scores.detach().argmax(-1) == moved.classes).float()
        record("accuracy", (correct * weights).mean(), weight=float(len(weights)))
        return (losses * weights).sum(), outputs


def _pairs_present(labels: torch.Tensor) -> torch.Tensor:
    """Return which pairs of rows of `labels` [R, T] are not padding: bool [R / 2]."""
    rows = (labels != IGNORED_LABEL).any(-1)
    return rows[0::2] & rows[1::2]


def _record_rewards(
    chosen_rewards: torch.Tensor, rejected_rewards: torch.Tensor, weights: torch.Tensor
) -> None:
    """Record the rewards of pairs under TRL's names for preferences; `weights`: 0 for padding."""
    for name, values in (
        ("rewards/chosen", chosen_rewards),
        ("rewards/rejected", rejected_rewards),
        ("rewards/margins", chosen_rewards - rejected_rewards),
        ("rewards/accuracies", (chosen_rewards > rejected_rewards).float()),
    ):
        record(name, (values * weights).mean(), weight=float(len(weights)))


class _Pairs:
    """Pairs of a micro-batch; `present`: bool [R / 2], false for padding."""

    def __init__(self, batch: ObjectiveBatch) -> None:
        self.batch = batch
        self.present = _pairs_present(batch.labels)

    def difference(self, rows: torch.Tensor) -> torch.Tensor:
        """Return chosen minus rejected of a value per row [R]; 0 for padding."""
        difference = rows[0::2] - rows[1::2]
        return torch.where(self.present, difference, torch.zeros_like(difference))


def _log1mexp(values: torch.Tensor) -> torch.Tensor:
    """Return log(1 - exp(x)) of x <= 0, stable at both ends (Maechler 2012); -inf at 0 is avoided
    by the smallest normal number."""
    values = values.clamp(max=-torch.finfo(values.dtype).tiny)
    is_small = values > -math.log(2)
    log_of_small = torch.log(-torch.expm1(torch.where(is_small, values, -torch.ones_like(values))))
    log_of_large = torch.log1p(-torch.exp(torch.where(is_small, -torch.ones_like(values), values)))
    return torch.where(is_small, log_of_small, log_of_large)


class RatedAnswers:
    """Loss of answers that are desirable or not (KTO, arXiv 2402.01306, equations 7 and 8).

    How far the model has moved from its reference is one number for a step: the mean over the
    mismatched answers of the global batch, 0 at least, without a gradient. In an evaluation it is
    the mean over all held-out samples, whose micro-batches this therefore keeps on the host."""

    def __init__(self, section: ObjectiveSection) -> None:
        self._section = section
        self._divergence: torch.Tensor | None = None

    def count(self, labels: torch.Tensor) -> int:
        return int((labels[0::2] != IGNORED_LABEL).any(-1).sum())

    def trained(self, batch: MicroBatch) -> MicroBatch:
        return batch.every_second(0)

    @torch.no_grad()
    def prepare(self, passes: Passes, batches: Iterable[MicroBatch]) -> Iterable[MicroBatch]:
        """Estimate the divergence. TRL does it for the micro-batches that ranks train at once."""
        all_batches = list(batches)
        total = torch.zeros(2, dtype=torch.float64)
        mismatched = (batch.every_second(1) for batch in all_batches)
        for batch, moved, policy in passes.row_sums(mismatched):
            reference = _reference_sums(passes, batch, moved)
            total = total.to(policy.device)
            total[0] += (policy - reference).sum()
            total[1] += (moved.labels != IGNORED_LABEL).any(-1).sum()
        total = passes.sum_over_replicas(total)
        self._divergence = (total[0] / total[1].clamp(min=1)).clamp(min=0).float()
        record("kl", self._divergence)
        return all_batches

    def summed_loss(
        self,
        passes: Passes,
        batch: MicroBatch,
        moved: MicroBatch,
        factor: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Any]:
        assert self._divergence is not None
        answers = self.trained(batch), self.trained(moved)
        reference = _reference_sums(passes, *answers)
        values, outputs = passes.log_probabilities(*answers)
        sums, desirable = values.sum(-1), answers[1].desirable
        assert desirable is not None
        weights = torch.where(
            desirable, self._section.desirable_weight, self._section.undesirable_weight
        )
        # 1 - sigma(+-beta (r - z)), + for desirable answers, with the log ratio r to the reference
        # and the divergence z.
        margins = (sums - reference - self._divergence) * torch.where(desirable, 1.0, -1.0)
        present = (answers[1].labels != IGNORED_LABEL).any(-1)
        losses = weights * (1 - torch.sigmoid(self._section.beta * margins)) * present
        self._record(answers[0], sums.detach(), self._section.beta * (sums.detach() - reference))
        return losses.sum(), outputs

    def _record(self, answers: MicroBatch, sums: torch.Tensor, rewards: torch.Tensor) -> None:
        """Record rewards as TRL does. `answers`: on the host."""
        assert answers.desirable is not None
        present = (answers.labels != IGNORED_LABEL).any(-1)
        for side, is_side in (("chosen", answers.desirable), ("rejected", ~answers.desirable)):
            mask = is_side & present
            if count := int(mask.sum()):
                mask = mask.to(sums.device)
                for name, row_values in (("rewards", rewards), ("logps", sums)):
                    record(f"{name}/{side}", (row_values * mask).sum() / count, weight=float(count))


@torch.no_grad()
def _reference_log_probabilities(
    passes: Passes, batch: MicroBatch, moved: MicroBatch
) -> torch.Tensor:
    """Return the log-probabilities of the targets under the reference model, float32 [R, T]."""
    with passes.reference():
        return passes.log_probabilities(batch, moved)[0]


def _reference_sums(passes: Passes, batch: MicroBatch, moved: MicroBatch) -> torch.Tensor:
    """Return the log-probability per row under the reference model, float32 [R]: the stored
    log-probability, if there is one."""
    if moved.reference is not None:
        return moved.reference
    return _reference_log_probabilities(passes, batch, moved).sum(-1)


class _UserLoss:
    """Loss of a class of the user; errors contain the location of the code."""

    def __init__(self, section: ObjectiveSection) -> None:
        self._name = f"objective.type = {section.type!r}"
        self._loss_class: Any = import_named("objective.type", section.type)
        try:
            self._objective = self._loss_class(**section.settings)
        except Exception as error:
            raise self._failure("its constructor", error) from error

    def __call__(self, batch: ObjectiveBatch) -> torch.Tensor:
        try:
            loss = self._objective.loss(batch)
        except Exception as error:
            raise self._failure("loss", error) from error
        if not torch.is_tensor(loss) or loss.numel() != 1:
            result = f"of shape {list(loss.shape)}" if torch.is_tensor(loss) else f"a {type(loss)}"
            raise self._wrong(f"loss returned {result}, not a tensor with one element")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise self._wrong("loss returned a tensor without a graph, so that nothing would train")
        return loss.float().reshape(())

    def _failure(self, action: str, error: Exception) -> ExtensionError:
        text = describe(error, self._loss_class)
        return ExtensionError(f"{self._name}: {action} raised {text} -> correct it")

    def _wrong(self, rule: str) -> ExtensionError:
        defined_at = location(self._loss_class.loss)
        return ExtensionError(f"{self._name}: {rule} ({defined_at}) -> sum the losses of its units")


def loss_terms(config: RunConfig) -> LossTerms:
    """Return the terms that a run adds to the cross-entropy of the next token."""
    section = config.objective
    distillation = section.alpha if section.type == "distillation" else 0.0
    return LossTerms(section.label_smoothing, section.z_loss, distillation)


def make_objective(config: RunConfig) -> Objective:
    """Return the objective of a run. Raises ExtensionError if a class of the user fails."""
    section = config.objective
    if is_imported(section.type):
        loss = _UserLoss(section)
        needs = compares_with_reference(section)
        return OfLogProbabilities(loss, unit_of(section), needs_reference=needs)
    if section.type == "kto":
        return RatedAnswers(section)
    if section.type == "reward":
        return Reward(section)
    if section.type == "classification":
        return Classification()
    if section.reads_pairs:
        preference = Preference(section)
        needs = section.needs_reference
        return OfLogProbabilities(preference.loss, "pairs", needs_reference=needs)
    return NextToken()
