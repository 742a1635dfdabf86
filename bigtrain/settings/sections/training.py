"""Sections on the optimization: how long, at which rate."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bigtrain.settings.sections.base import Fraction, NonNegativeInt, PositiveInt, Section


class TrainSection(Section):
    """How long to train."""

    steps: PositiveInt = Field(description="optimizer steps of the whole run")


class ScheduleSection(Section):
    """Learning rate over steps: linear warm-up, then `type`. See
    `bigtrain.settings.lr_schedule`."""

    type: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup_steps: NonNegativeInt = Field(
        default=0, description="optimizer steps from zero to the peak"
    )
    decay_steps: PositiveInt | None = Field(
        default=None,
        description="cosine and linear: steps after warm-up until the minimum (default: the rest "
        "of the run); wsd: length of the final decay (default: a tenth of the run)",
    )
    min_lr_ratio: Fraction = Field(
        default=0.1, description="final learning rate as a fraction of the peak"
    )
