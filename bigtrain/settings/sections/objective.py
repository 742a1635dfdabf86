"""Section on the objective: what a run minimizes."""

from __future__ import annotations

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from bigtrain.settings.sections.base import NonNegativeFloat, PositiveInt, Section
from bigtrain.settings.sections.extensions import (
    CodeSettings,
    ImportedName,
    is_imported,
    known_or_imported,
)

KnownObjective = Literal[
    "next_token", "preference", "kto", "reward", "classification", "distillation"
]
PreferenceLoss = Literal["sigmoid", "ipo", "simpo", "orpo"]
REFERENCE_FREE: tuple[PreferenceLoss, ...] = ("simpo", "orpo")
"""Losses that compare the answers of a pair without a reference model."""


class ObjectiveSection(Section):
    """Loss of the training. See docs/howto/objectives.md."""

    type: KnownObjective | ImportedName = "next_token"
    """next_token: cross-entropy of the next token; preference: pairs of a chosen and a rejected
    answer (rows: preference in the data's manifest); kto: answers that are labeled desirable or not
    (rows: kto; arXiv 2402.01306); reward: a scalar head that scores the chosen
    answer of a pair higher (rows: preference); classification: a head that gives a sample one of
    several labels (rows: classification); distillation: the next token, and the probabilities of a
    teacher for it (arXiv 1503.02531); or a class of yours, as package.module:Class"""
    loss: PreferenceLoss = "sigmoid"
    """preference: sigmoid (DPO, arXiv 2305.18290), ipo (arXiv 2310.12036), simpo (arXiv 2405.14734)
    or orpo (arXiv 2403.07691)"""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """kto and preference: strength with which the loss keeps the model near the reference (kto,
    sigmoid, ipo), scale of the reward (simpo), weight of the odds ratio (orpo)"""
    desirable_weight: Annotated[float, Field(gt=0)] = 1.0
    """kto: weight of the losses of desirable answers"""
    undesirable_weight: Annotated[float, Field(gt=0)] = 1.0
    """kto: weight of the losses of undesirable answers"""
    gamma: NonNegativeFloat = 0.0
    """simpo: margin by which the chosen answer's reward is to be larger"""
    center_rewards_coefficient: NonNegativeFloat = 0.0
    """reward: weight of the squared sum of a pair's two rewards, which keeps their mean at 0 (arXiv
    2312.09244)"""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """next_token: share of each target that is divided equally over the vocabulary (arXiv
    1512.00567), in training only"""
    z_loss: NonNegativeFloat = 0.0
    """next_token: weight of the squared logarithm of the softmax's denominator, which keeps the
    logits small (PaLM: 1e-4, arXiv 2204.02311), in training only"""
    mtp_weight: NonNegativeFloat = 0.0
    """next_token: weight of the loss of the multi-token-prediction layers that the model's
    configuration counts (num_nextn_predict_layers), in training only; DeepSeek-V3: 0.3, later 0.1
    (arXiv 2412.19437), Megatron-LM: 0.1; 0 neither builds nor trains these layers"""
    reference: Annotated[str, Field(min_length=1)] | None = None
    """kto, and preference with a reference: directory of scores of the data under the initial
    weights, made by `bigtrain score --output` (null: adapters off, or computed by the run at its
    start)"""
    teacher: Annotated[str, Field(min_length=1)] | None = None
    """distillation: directory of scores of the data under the teacher, made by `bigtrain score
    --kind top-k --output`"""
    teacher_model: Annotated[str, Field(min_length=1)] | None = None
    """distillation: Hugging Face model (directory or name on the hub) that computes the teacher's
    probabilities in the run instead, frozen and divided over the ranks like the student"""
    teacher_top_k: PositiveInt = 64
    """distillation with teacher_model: number of most probable tokens whose probabilities are
    compared one by one; the others are compared as one"""
    alpha: Annotated[float, Field(gt=0, le=1)] = 0.5
    """distillation: weight of the divergence from the teacher, in training only; that of the
    cross-entropy is 1 - alpha"""
    settings: CodeSettings = Field(default_factory=dict)
    """arguments of the constructor of a class of yours"""

    @property
    def reads_pairs(self) -> bool:
        """Whether a sample is a pair of answers, for an objective of bigtrain."""
        return self.type == "preference"

    @property
    def scores_samples(self) -> bool:
        """Whether the model has a head that scores a sample at its last token."""
        return self.type in ("reward", "classification")

    @property
    def needs_reference(self) -> bool:
        """Whether it compares with a reference model, for an objective of bigtrain."""
        return self.type == "kto" or (self.reads_pairs and self.loss not in REFERENCE_FREE)

    @field_validator("type", mode="before")
    @classmethod
    def _is_known(cls, name: object) -> object:
        return known_or_imported(name, get_args(KnownObjective))

    @model_validator(mode="after")
    def _has_an_effect(self) -> Self:
        if self.settings and not is_imported(self.type):
            raise ValueError(
                "objective.settings are arguments of a class of yours, and objective.type = "
                f"{self.type!r} is bigtrain's own -> omit them"
            )
        unused = [] if self.reads_pairs else ["loss"]
        if not self.reads_pairs or self.loss != "simpo":
            unused += ["gamma"]
        if self.type != "kto":
            unused += ["desirable_weight", "undesirable_weight"]
            unused += [] if self.reads_pairs else ["beta"]
        if self.type != "reward":
            unused += ["center_rewards_coefficient"]
        if self.type != "distillation":
            unused += ["teacher", "teacher_model", "alpha"]
        elif (self.teacher is None) == (self.teacher_model is None):
            number = "one of" if self.teacher is None else "only one of"
            raise ValueError(
                f"objective.type = 'distillation' needs {number} objective.teacher, the directory "
                "of `bigtrain score --config TEACHER.yaml --kind top-k --output DIR`, and "
                "objective.teacher_model, a model that is computed in the run -> omit the other"
            )
        if self.teacher_model is None:
            unused += ["teacher_top_k"]
        if self.type != "next_token":
            unused += ["label_smoothing", "z_loss", "mtp_weight"]
        if not self.needs_reference:
            unused += ["reference"]
        for name in unused:
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                owner = f"type = {self.type}"
                depends_on_loss = name in ("gamma", "reference") and self.reads_pairs
                owner = f"loss = {self.loss}" if depends_on_loss else owner
                raise ValueError(
                    f"objective.{name} = {value} has no effect with objective.{owner} -> omit it"
                )
        return self
