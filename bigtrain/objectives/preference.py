"""Pairs of a chosen and a rejected answer: DPO, IPO, SimPO and ORPO. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from bigtrain.objectives.kind import ObjectiveFields, ObjectiveKind
from bigtrain.objectives.rows import AnswerRows, Refusal
from bigtrain.settings.sections.base import NonNegativeFloat

PairLoss = Literal["sigmoid", "ipo", "simpo", "orpo"]

PAIRS = AnswerRows(
    name="preference",
    documents=("chosen", "rejected"),
    keys=("chosen", "rejected", "prompt", "tools"),
    identifying=frozenset({"chosen", "rejected"}),
    noun="a preference pair",
    parse="bigtrain.data.documents.preferences:pair",
    encode="bigtrain.data.chat.preferences:encode_pairs",
    samples="bigtrain.data.samples.documents:PairSamples",
    padded="each answer of a pair",
    learned="the answers of",
    summary="{rows:,} pairs, of each two documents: chosen, rejected",
    document="pair {row}, {name}",
    identity="pairs",
    missing=Refusal("has no preference pairs, which {} reads", "tokenize preference data"),
    for_next_token=Refusal(
        "has preference pairs, and next_token would learn the rejected answers, too",
        "objective.type=preference, or reward",
    ),
    rows_per_sample=2,
)


class PreferenceFields(ObjectiveFields):
    """Field of preference."""

    loss: PairLoss = "sigmoid"
    """preference: sigmoid (DPO, arXiv 2305.18290), ipo (arXiv 2310.12036), simpo (arXiv 2405.14734)
    or orpo (arXiv 2403.07691)"""


class StrengthFields(ObjectiveFields):
    """Field of preference and kto."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """kto and preference: strength with which the loss keeps the model near the reference (kto,
    sigmoid, ipo), scale of the reward (simpo), weight of the odds ratio (orpo)"""


class SimpoFields(ObjectiveFields):
    """Field of preference with simpo."""

    gamma: NonNegativeFloat = 0.0
    """simpo: margin by which the chosen answer's reward is to be larger"""


class ReferenceFields(ObjectiveFields):
    """Field of preference and kto, whose reference may have stored scores."""

    reference: Annotated[str, Field(min_length=1)] | None = None
    """kto, and preference with a reference: directory of scores of the data under the initial
    weights, made by `bigtrain score --output` (null: adapters off, or computed by the run at its
    start)"""


class _Fields(PreferenceFields, StrengthFields, SimpoFields, ReferenceFields):
    """Settings that preference reads."""


class Preference(ObjectiveKind[_Fields]):
    """Losses of pairs of answers."""

    name = "preference"
    summary = "pairs of a chosen and a rejected answer (rows: preference in the data's manifest)"
    fields = _Fields
    decisive = "loss"
    loss = "bigtrain.objectives.losses.preference:PreferenceLoss"
    unit = "pairs"
    rows = PAIRS

    @property
    def needs_reference(self) -> bool:
        return self.section.loss in ("sigmoid", "ipo")

    def unread(self) -> list[str]:
        unread = [] if self.section.loss == "simpo" else ["gamma"]
        return unread if self.needs_reference else [*unread, "reference"]
