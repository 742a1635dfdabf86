"""Pairs of a chosen and a rejected answer: DPO and its variants, SimPO and ORPO. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from bigtrain.objectives.kind import Better, ObjectiveFields, ObjectiveKind
from bigtrain.objectives.next_token import SmoothingFields
from bigtrain.objectives.rows import AnswerRows, Refusal
from bigtrain.settings.sections.base import NonNegativeFloat

PairLoss = Literal[
    "sigmoid",
    "sigmoid_norm",
    "hinge",
    "ipo",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
    "simpo",
    "orpo",
]
"""Losses of a pair, by TRL's names."""
_WITHOUT_REFERENCE = ("simpo", "orpo")
_SMOOTHED = ("sigmoid", "robust", "exo_pair")
_SORTED = "sorts the margins of a batch, so that it is no mean over pairs -> sigmoid"
_REMEDIES = {
    "dpo": "the loss of DPO has TRL's name -> sigmoid",
    "cdpo": "it is sigmoid with a share of wrong preferences -> sigmoid, with label_smoothing",
    "rpo": "it adds the loss of the chosen answer -> sigmoid, with sft_weight",
    "sft": "it has no rejected answer -> objective.type=next_token, or objective.sft_weight",
    "aot": _SORTED,
    "aot_pair": _SORTED,
    "aot_unpaired": _SORTED,
}
"""Names of losses in other tools, with what to write here."""
REWARD_METRICS: dict[str, Better] = {
    "rewards/chosen": None,
    "rewards/rejected": None,
    "rewards/margins": "max",
    "rewards/accuracies": "max",
}

PAIRS = AnswerRows(
    name="preference",
    documents=("chosen", "rejected"),
    keys=("chosen", "rejected", "prompt", "tools"),
    identifying=frozenset({"chosen", "rejected"}),
    noun="a preference pair",
    parse="bigtrain.data.documents.preferences:pair",
    encode="bigtrain.data.chat.preferences:encode_pairs",
    samples="bigtrain.data.samples.documents:PairSamples",
    padded_unit="each answer of a pair",
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
    """preference: sigmoid (DPO, arXiv 2305.18290), simpo (arXiv 2405.14734), orpo (arXiv
    2403.07691), or another loss of pairs of TRL (equations: docs/howto/objectives.md)"""
    sft_weight: NonNegativeFloat = 0.0
    """preference: weight of the chosen answer's mean negative log-probability per token, which is
    added to the loss (RPO, arXiv 2404.19733; LLaMA-Factory: pref_ftx)"""

    @field_validator("loss", mode="before")
    @classmethod
    def _is_of_pairs(cls, name: object) -> object:
        if isinstance(name, str) and (remedy := _REMEDIES.get(name)):
            raise ValueError(f"objective.loss = {name!r}: {remedy}")
        return name


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


class _Fields(PreferenceFields, StrengthFields, SimpoFields, ReferenceFields, SmoothingFields):
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
    metrics: ClassVar[Mapping[str, Better]] = MappingProxyType(
        {**REWARD_METRICS, "logps/chosen": None, "logps/rejected": None}
    )

    @property
    def needs_reference(self) -> bool:
        return self.section.loss not in _WITHOUT_REFERENCE

    def unread(self) -> list[str]:
        unread = [] if self.section.loss == "simpo" else ["gamma"]
        if not self.needs_reference:
            unread.append("reference")
        # Chosen and rejected are exchanged with this probability, so it is below one half.
        smoothing = self.section.label_smoothing
        if self.section.loss not in _SMOOTHED:
            unread.append("label_smoothing")
        elif smoothing >= 0.5:
            raise ValueError(
                f"objective.label_smoothing = {smoothing}: the share of pairs whose preference is "
                "wrong; at one half or more, the rejected answers would be learned -> below 0.5"
            )
        elif self.section.loss == "exo_pair" and smoothing == 0:
            raise ValueError(
                "objective.label_smoothing = 0: exo_pair takes its logarithm -> 0.001, TRL's value"
            )
        return unread
