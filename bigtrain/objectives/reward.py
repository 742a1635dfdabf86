"""Scalar head that scores the chosen answer of a pair higher. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from bigtrain.objectives.kind import Better, ObjectiveFields, ObjectiveKind
from bigtrain.objectives.preference import PAIRS, REWARD_METRICS
from bigtrain.settings.sections.base import NonNegativeFloat


class RewardFields(ObjectiveFields):
    """Field of reward."""

    center_rewards_coefficient: NonNegativeFloat = 0.0
    """reward: weight of the squared sum of a pair's two rewards, which keeps their mean at 0 (arXiv
    2312.09244)"""


class Reward(ObjectiveKind[RewardFields]):
    """Loss of a model that scores answers."""

    name = "reward"
    summary = "a scalar head that scores the chosen answer of a pair higher (rows: preference)"
    fields = RewardFields
    loss = "bigtrain.objectives.losses.reward:RewardLoss"
    unit = "pairs"
    rows = PAIRS
    scores_samples = True
    metrics: ClassVar[Mapping[str, Better]] = MappingProxyType(REWARD_METRICS)
    # The model scores an answer at its last token, which is therefore an input.
    sample_options = MappingProxyType({"is_complete": True})
