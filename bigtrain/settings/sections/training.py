"""Sections on the optimization: how long, by what, at which rate."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from bigtrain.settings.sections.base import Fraction, NonNegativeInt, PositiveInt, Section


class TrainSection(Section):
    """How long to train."""

    steps: PositiveInt = Field(description="optimizer steps of the whole run")


class OptimizerSection(Section):
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) with decay and no-decay groups."""

    type: Literal["adamw"] = "adamw"
    lr: Annotated[float, Field(gt=0)] = Field(description="peak learning rate")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.95,
    )
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.1, description="decoupled decay of the decay group"
    )
    decay_embeddings: bool = Field(
        default=True,
        description="whether embeddings are in the decay group; biases, norms and every other "
        "parameter of fewer than two dimensions never are",
    )
    clip_norm: Annotated[float, Field(ge=0)] = Field(
        default=1.0, description="global gradient norm to clip to; 0 turns clipping off"
    )


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
