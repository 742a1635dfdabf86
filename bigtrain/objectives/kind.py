"""Record of a kind of objective, as settings, data, planner, engine and export ask it. Pure.

``config.objective.kind`` is the kind of a run. What differs between kinds is an attribute or a
method here, with the usual answer; the kind's module overrides it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

from bigtrain.errors import Problem
from bigtrain.objectives.rows import AnswerRows
from bigtrain.settings.sections.adapters import AdaptersSection
from bigtrain.settings.sections.base import Section
from bigtrain.settings.sections.data import DataSection
from bigtrain.settings.sections.evaluation import EvaluationSection
from bigtrain.settings.sections.model import ModelSection
from bigtrain.settings.sections.running import ParallelSection
from bigtrain.settings.sections.sites import SitesSection

Better = Literal["min", "max"] | None
"""Whether a lower or a higher value of a metric is better; None: it depends."""
Unit = Literal["tokens", "rows", "pairs"]
"""Units over which the loss of a step is the mean: target tokens of the global batch, rows (samples
of one document, or packed) with a target, or pairs of rows."""


class ObjectiveFields(Section):
    """Fields of a kind of objective, a part of the section ``objective``."""

    type: str = "next_token"


class RunSections(Protocol):
    """Sections of a run (`bigtrain.settings.run_config.RunConfig`) that an objective looks at."""

    @property
    def model(self) -> ModelSection: ...
    @property
    def adapters(self) -> AdaptersSection | None: ...
    @property
    def data(self) -> DataSection: ...
    @property
    def parallel(self) -> ParallelSection: ...
    @property
    def sites(self) -> SitesSection | None: ...
    @property
    def evaluation(self) -> EvaluationSection: ...


FieldsT = TypeVar("FieldsT", bound=ObjectiveFields)


class ObjectiveKind(Generic[FieldsT]):
    """A kind of objective, with the settings of a run.

    name: of ``objective.type``. summary: text of the reference of settings. fields: the settings
    that the objective reads. loss: its class in `bigtrain.objectives.losses`, as module:Class.

    unit: unit of the mean loss. rows: rows of data that the objective reads; None for documents.
    sample_options: arguments of the class of the samples. decisive: the setting that decides which
    other settings have an effect.

    is_next_token: whether the loss is the cross-entropy of the next token only, which is needed for
    weights of tokens, for ``batch.phases`` and for metrics other than the loss. scores_samples:
    whether the model has a head that scores a sample at its last token. metrics: names that the
    loss records, in training and of held-out data; None if they are not known beforehand.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    fields: ClassVar[type[ObjectiveFields]]
    loss: ClassVar[str]
    unit: Unit = "tokens"
    rows: AnswerRows | None = None
    sample_options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    decisive: ClassVar[str] = "type"
    is_next_token: ClassVar[bool] = False
    scores_samples: ClassVar[bool] = False
    metrics: ClassVar[Mapping[str, Better] | None] = MappingProxyType({})

    def __init__(self, section: FieldsT) -> None:
        self.section = section

    @property
    def needs_reference(self) -> bool:
        """Whether the loss is a function of log-probabilities under a reference model."""
        return False

    @property
    def unit_name(self) -> str:
        """Unit of the loss, as the card of an exported model names it."""
        return self.unit.removesuffix("s")

    @property
    def teacher_weight(self) -> float:
        """Weight of the divergence from a teacher; the cross-entropy has 1 minus this weight."""
        return 0.0

    @property
    def rows_per_sample(self) -> int:
        """Rows of a sample: 2 for a pair, and for an answer with a mismatched one."""
        return 1 if self.rows is None else self.rows.rows_per_sample

    @property
    def trained_rows_per_sample(self) -> int:
        """Rows of a sample in a forward pass with gradients."""
        return 2 if self.unit == "pairs" else 1

    def reads_scores(self, run: RunSections) -> bool:
        """Return whether a run reads stored log-probabilities of the data under a reference model.
        With adapters that can be turned off the reference is the model without them; in pipeline
        stages no reference pass fits between the micro-batches."""
        adapters = run.adapters
        can_turn_off = adapters is not None and not adapters.changes_base
        can_compute = can_turn_off and run.parallel.pipeline == 1
        is_named = getattr(self.section, "reference", None) is not None
        return self.needs_reference and (is_named or not can_compute)

    def num_reference_rows(self, run: RunSections) -> int:
        """Return the rows of a sample in forward passes without gradients: passes of the reference,
        unless its scores are stored."""
        needs_pass = self.needs_reference and not self.reads_scores(run)
        return self.trained_rows_per_sample if needs_pass else 0

    def derived_metrics(self, recorded: Mapping[str, float]) -> dict[str, float]:
        """Return metrics that follow from `recorded`, the values that the loss recorded."""
        return {}

    def unread(self) -> list[str]:
        """Return the names in `fields` that have no effect with the value of `decisive`. Raises
        ValueError for settings that contradict each other."""
        return []

    def import_problems(self) -> list[Problem]:
        """Return the problems of code of the user."""
        return []

    def problems(self, run: RunSections) -> list[Problem]:
        """Return the problems of settings of other sections."""
        return [
            *self._row_problems(run.data),
            *(self._score_problems(run) if self.scores_samples else ()),
        ]

    def _row_problems(self, data: DataSection) -> list[Problem]:
        """Return the problems of settings without a meaning for samples in separate rows."""
        if self.rows is None:
            return []
        rule = f"{self.rows.padded_unit} is a row of its own, padded at the end"
        return [
            Problem(f"data.{name}", value, rule, f"data.{name}={json.dumps(unset)}")
            for name, value, unset in (
                ("packing", data.packing, "concatenate"),
                ("document_boundaries", data.document_boundaries, "ignore"),
                ("chunk_length", data.chunk_length, None),
                ("mask_end_of_document", data.mask_end_of_document, False),
                ("samples", data.samples and data.samples.type, None),
            )
            if value != unset
        ]

    def _score_problems(self, run: RunSections) -> list[Problem]:
        """Return the problems of settings that a model with a score head, which predicts no tokens,
        has no use for."""
        rule = f"objective.type = {self.section.type} trains a model that predicts no tokens"
        evaluation = run.evaluation
        return [
            Problem(key, value, rule, remedy)
            for key, value, remedy in (
                ("evaluation.prompts", list(evaluation.prompts), "omit it"),
                ("evaluation.tasks", list(evaluation.tasks), "omit it"),
                ("model.vocabulary", run.model.vocabulary, "grow the base first: bigtrain grow"),
                ("model.type", run.model.type, "a model class of transformers"),
            )
            if value
        ]
