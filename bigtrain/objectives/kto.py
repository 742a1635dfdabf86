"""Answers that are labeled desirable or not (KTO, arXiv 2402.01306). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar

from pydantic import Field

from bigtrain.objectives.kind import Better, ObjectiveFields, ObjectiveKind, RunSections
from bigtrain.objectives.preference import ReferenceFields, StrengthFields
from bigtrain.objectives.rows import AnswerRows, Refusal

RATED = AnswerRows(
    name="kto",
    documents=("answer",),
    keys=("prompt", "completion", "label", "tools"),
    identifying=frozenset({"prompt", "completion", "label"}),
    noun="an answer with a label",
    parse="bigtrain.data.documents.preferences:labeled",
    encode="bigtrain.data.chat.preferences:encode_labeled",
    samples="bigtrain.data.samples.rated:RatedSamples",
    padded_unit="each answer",
    learned="the answers of",
    summary="{ones:,} desirable and {zeros:,} undesirable answers",
    document="{label}",
    identity="kto",
    missing=Refusal("has no answers with labels, which {} reads", "tokenize with --format kto"),
    for_next_token=Refusal(
        "has answers with labels (kto), and next_token would learn the undesirable ones, too",
        "objective.type=kto",
    ),
    rows_per_sample=2,
    is_labeled=True,
    label_names=("undesirable", "desirable"),
    has_mismatched=True,
)


class KtoFields(ObjectiveFields):
    """Fields of kto."""

    desirable_weight: Annotated[float, Field(gt=0)] = 1.0
    """kto: weight of the losses of desirable answers"""
    undesirable_weight: Annotated[float, Field(gt=0)] = 1.0
    """kto: weight of the losses of undesirable answers"""


class _Fields(KtoFields, StrengthFields, ReferenceFields):
    """Settings that kto reads."""


class Kto(ObjectiveKind[_Fields]):
    """Loss of rated answers. A sample is an answer and a mismatched answer."""

    name = "kto"
    summary = "answers that are labeled desirable or not (rows: kto; arXiv 2402.01306)"
    fields = _Fields
    loss = "bigtrain.objectives.losses.kto:KtoLoss"
    unit = "rows"
    unit_name = "answer"
    rows = RATED

    metrics: ClassVar[Mapping[str, Better]] = MappingProxyType(
        {
            "kl": None,
            "rewards/chosen": None,
            "rewards/rejected": None,
            "rewards/margins": "max",
            "logps/chosen": None,
            "logps/rejected": None,
        }
    )

    @property
    def needs_reference(self) -> bool:
        return True

    def derived_metrics(self, recorded: Mapping[str, float]) -> dict[str, float]:
        # As in TRL the difference of the means, for no answer has both sides.
        sides = [recorded.get(f"rewards/{side}") for side in ("chosen", "rejected")]
        if sides[0] is None or sides[1] is None:
            return {}
        return {"rewards/margins": sides[0] - sides[1]}

    def num_reference_rows(self, run: RunSections) -> int:
        """Return the rows in passes without gradients: the mismatched answer by the model, and both
        answers by the reference unless their scores are stored."""
        return 1 if self.reads_scores(run) else 3
