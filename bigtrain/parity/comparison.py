"""Comparison of a topology with the reference, and the location of the first difference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bigtrain.models.equivalence.trial import (
    GRADIENT,
    LOSS,
    OUTPUT,
    Tolerance,
    distances,
    first_difference,
    worst,
)
from bigtrain.parity.reference import TrainingTrace

LOSS_TOLERANCE = 1e-5
"""Tolerance of the loss in nats, at every step; float32 rounding is a tenth of it."""
NORM_TOLERANCE = 1e-4
"""Tolerance of the gradient norm, at every step."""
WEIGHT_TOLERANCE = 1e-5
"""Tolerance of any weight at the end, unless rounding makes a larger difference (`ROUNDING`)."""
ROUNDING = 4.0
"""Allowed difference of a weight, as a multiple of the difference between plain PyTorch runs that
sum in different orders."""

_SPREADS = 3.0
"""16 bit: allowed distance from the mean of the plain runs, as a multiple of the largest distance
of a plain run."""


@dataclass(frozen=True)
class Limits:
    """Largest differences that count as rounding: of the loss in nats, of the gradient norm
    (relative), of the weights, and of the sum of squares of a layer's output (relative)."""

    loss: float = LOSS_TOLERANCE
    norm: float = NORM_TOLERANCE
    weight: float = WEIGHT_TOLERANCE
    layer: float = 1e-4


@dataclass(frozen=True)
class Verdict:
    """Result of a topology: the worst differences, and where the first difference arises. crash:
    the first line of the error with which it ended; then nothing was compared."""

    loss: float = math.inf
    norm: float = math.inf
    weight: float = math.inf
    limits: Limits = Limits()
    first_difference: str = ""
    crash: str = ""

    @property
    def passed(self) -> bool:
        """True if all differences are within tolerance. NaN counts as a difference."""
        return (
            not self.crash
            and self.loss <= self.limits.loss
            and self.norm <= self.limits.norm
            and self.weight <= self.limits.weight
        )


def compare(
    references: Sequence[TrainingTrace],
    trace: TrainingTrace,
    reordered: Sequence[TrainingTrace] = (),
) -> Verdict:
    """Return the worst differences of `trace`, and where the first arises if they are too large.

    Several references, which differ only by rounding, are compared by their mean, and their
    distances from it set the limits. reordered: runs of a single reference with sums in other
    orders, which set the limits of weights. The verdict's weight is then the weight closest to its
    limit, or farthest beyond it.
    """
    reference, limits = mean_of(references)
    loss, norm, weight = _distances(reference, trace)
    if reordered:
        # A weight may differ by a multiple of the largest difference between reordered runs.
        differences = _weight_distances(reference, trace)
        rounding_errors = [_weight_distances(reference, run) for run in reordered]
        allowed_differences = {
            name: max(WEIGHT_TOLERANCE, ROUNDING * max(errors[name] for errors in rounding_errors))
            for name in reference.last
        }
        name = worst(differences, allowed_differences)
        weight, limits = differences[name], replace(limits, weight=allowed_differences[name])
    verdict = Verdict(loss, norm, weight, limits)
    if verdict.passed:
        return verdict
    return replace(verdict, first_difference=_first_difference(reference, trace, limits))


def mean_of(references: Sequence[TrainingTrace]) -> tuple[TrainingTrace, Limits]:
    """Return the mean of `references`, and the limits: a multiple of their distances from it."""
    if len(references) == 1:
        return references[0], Limits()
    mean = TrainingTrace(
        _mean_by_step([r.losses for r in references]),
        _mean_by_step([r.norms for r in references]),
        _mean([r.layers for r in references]),
        _mean([r.first for r in references]),
        _mean([r.last for r in references]),
    )
    distances = [_distances(mean, reference) for reference in references]
    loss, norm, weight = (_SPREADS * max(values) for values in zip(*distances, strict=True))
    return mean, Limits(loss, norm, weight, layer=2e-2)


def _mean_by_step(runs: Sequence[Sequence[float]]) -> list[float]:
    return [sum(values) / len(runs) for values in zip(*runs, strict=True)]


def _mean(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}


def _distances(reference: TrainingTrace, trace: TrainingTrace) -> tuple[float, float, float]:
    """Return three largest differences: between the losses of a step, between the gradient norms of
    a step (as a fraction of the norm of `reference`), and between the weights at the end."""
    # Norms are compared in units of the reference's norm, so the reference itself has norm 1, or
    # NaN for a norm of 0, which counts as an infinite difference.
    unit = _scalars(reference.norms)
    largest = distances(
        {"loss": _scalars(reference.losses), "norm": unit / unit},
        {"loss": _scalars(trace.losses), "norm": _scalars(trace.norms) / unit},
    )
    return largest["loss"], largest["norm"], max(_weight_distances(reference, trace).values())


def _weight_distances(reference: TrainingTrace, trace: TrainingTrace) -> dict[str, float]:
    """Return the differences of the weights of `reference` at the end."""
    differences = distances(reference.last, trace.last)
    return {name: differences[name] for name in reference.last}


def _first_difference(reference: TrainingTrace, measured: TrainingTrace, limits: Limits) -> str:
    """Return where `measured` first differs, in the order of a step's computation. The weights
    after the first step show its gradients."""
    tolerances = {
        OUTPUT: Tolerance(relative=limits.layer),
        LOSS: Tolerance(absolute=limits.loss),
        GRADIENT: Tolerance(absolute=limits.weight),
    }
    expected, actual = (
        {
            OUTPUT: {name: _scalars([trace.layers[name]]) for name in trace.layers},
            LOSS: {"loss": _scalars(trace.losses[:1])},
            GRADIENT: {name: trace.first[name] for name in reference.first if name in trace.first},
        }
        for trace in (reference, measured)
    )
    difference = first_difference(expected, actual, tolerances)
    if difference is None:
        return "after the first step: gradient norm, clipping or optimizer"
    if difference.category == OUTPUT:
        return f"the output of {difference.name}, in the forward pass"
    if difference.category == LOSS:
        return "after the last layer: norm, head or loss"
    return f"the {difference.where}, in the backward pass of the first step"


def _scalars(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)
