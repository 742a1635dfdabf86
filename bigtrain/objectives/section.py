"""Section ``objective`` of the run YAML, and the table of kinds of objectives. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import field_validator, model_validator

from bigtrain.objectives.classification import Classification
from bigtrain.objectives.distillation import Distillation, DistillationFields
from bigtrain.objectives.kind import ObjectiveKind
from bigtrain.objectives.kto import Kto, KtoFields
from bigtrain.objectives.next_token import NextToken, NextTokenFields
from bigtrain.objectives.preference import (
    Preference,
    PreferenceFields,
    ReferenceFields,
    SimpoFields,
    StrengthFields,
)
from bigtrain.objectives.reward import Reward, RewardFields
from bigtrain.objectives.rows import AnswerRows
from bigtrain.objectives.user import UserFields, UserObjective
from bigtrain.settings.sections.extensions import ImportedName, known_or_imported

KINDS: dict[str, type[ObjectiveKind[Any]]] = {
    objective.name: objective
    for objective in (NextToken, Preference, Kto, Reward, Classification, Distillation)
}
"""Kinds of objectives by ``objective.type``, in the order in which they are listed to a user."""

ROWS: dict[str | None, AnswerRows] = {
    objective.rows.name: objective.rows
    for objective in KINDS.values()
    if objective.rows is not None
}
"""Rows of data that objectives read, by ``rows`` in the manifest and ``tokenize --format``; plain
documents are None in the manifest, and not here."""


def documents_per_row(rows: str | None) -> int:
    """Return the documents that a row of a dataset becomes; `rows`: as in the manifest."""
    return 1 if rows is None else len(ROWS[rows].documents)


if TYPE_CHECKING:
    KnownObjective = str
else:
    KnownObjective = Literal[tuple(KINDS)]


class ObjectiveSection(  # pydantic lists the fields of the last base first
    UserFields,
    DistillationFields,
    ReferenceFields,
    NextTokenFields,
    RewardFields,
    SimpoFields,
    KtoFields,
    StrengthFields,
    PreferenceFields,
):
    """Loss of the training. See docs/howto/objectives.md."""

    type: KnownObjective | ImportedName = "next_token"

    @property
    def kind(self) -> ObjectiveKind[Any]:
        """Kind of the objective, with these settings."""
        objective_class: type[ObjectiveKind[Any]] = KINDS.get(self.type, UserObjective)
        return objective_class(self)

    @property
    def has_plain_entropies(self) -> bool:
        """Whether the loss is computed from cross-entropies of tokens to which no terms are added
        in training."""
        kind = self.kind
        smooths_targets = kind.is_next_token and self.label_smoothing > 0
        adds_terms = smooths_targets or self.z_loss > 0 or kind.teacher_weight > 0
        return not kind.scores_samples and not adds_terms

    @classmethod
    def descriptions(cls) -> dict[str, str]:
        summaries = [f"{name}: {objective.summary}" for name, objective in KINDS.items()]
        text = "; ".join([*summaries, "or a class of yours, as package.module:Class"])
        return {**super().descriptions(), "type": text}

    @field_validator("type", mode="before")
    @classmethod
    def _is_known(cls, name: object) -> object:
        return known_or_imported(name, list(KINDS))

    @model_validator(mode="after")
    def _has_an_effect(self) -> Self:
        if self.settings and self.type in KINDS:
            raise ValueError(
                "objective.settings are arguments of a class of yours, and objective.type = "
                f"{self.type!r} is bigtrain's own -> omit them"
            )
        objective = self.kind
        unread, fields = objective.unread(), objective.fields.model_fields
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name in fields and name not in unread:
                continue
            # Only the default is accepted of a field that this kind of objective does not read.
            if value != field.get_default(call_default_factory=True):
                key = objective.decisive if name in fields else "type"
                raise ValueError(
                    f"objective.{name} = {value} has no effect with objective.{key} = "
                    f"{getattr(self, key)} -> omit it"
                )
        return self
