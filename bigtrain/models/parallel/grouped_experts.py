"""Mixtures of experts whose widths torch's grouped matrix products cannot take."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from bigtrain.models.parallel.sharding import local_shape
from bigtrain.models.transformers_patches import modules_of_experts

GROUPED_UNIT = 8
"""Elements: torch's grouped matrix products want rows of whole 16 bytes, in 16 bit too."""


def fit_experts(model: PreTrainedModel) -> None:
    """Let experts be computed one after the other where no grouped product takes their widths.

    transformers takes grouped products wherever a class knows them, also for widths at which they
    fail: odd ones of a configuration, or what tensor parallelism leaves of others. Its loop over
    experts is the same function. Parameters are to have the shapes that they will be used with.
    """
    if model.get_experts_implementation()[""] != "grouped_mm":
        return
    stacked = (
        parameter
        for module in modules_of_experts(model)
        for parameter in module.parameters(recurse=False)
    )
    if any(is_odd(parameter) for parameter in stacked):
        model.set_experts_implementation("eager")


def is_odd(parameter: nn.Parameter) -> bool:
    """Whether grouped products cannot take a stack of matrices [experts, rows, columns]."""
    shape = local_shape(parameter)
    return len(shape) == 3 and any(size % GROUPED_UNIT for size in shape[1:])
