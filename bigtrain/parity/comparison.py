"""How far a topology is from the reference, and where the first difference arises."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bigtrain.parity.reference import Figures
from bigtrain.parity.topologies import Point

LOSS_TOLERANCE = 1e-5
"""In nats, at every step; float32 rounding is a tenth of it."""
NORM_TOLERANCE = 1e-4
"""Of the gradient norm, at every step."""
WEIGHT_TOLERANCE = 1e-5
"""Of any weight, at the end, where rounding takes it less far."""
ROUNDING = 4.0
"""How many times as far as plain PyTorch's own runs are apart that add up in another order."""

_SPREADS = 3.0
"""16 bit: how many times as far from the mean of the plain runs as the farthest of them."""


@dataclass(frozen=True)
class Limits:
    """The largest differences that are rounding: of the loss in nats, of the norm relative to it,
    of the weights, and of what a layer puts out, in squares relative to those."""

    loss: float = LOSS_TOLERANCE
    norm: float = NORM_TOLERANCE
    weight: float = WEIGHT_TOLERANCE
    layer: float = 1e-4


@dataclass(frozen=True)
class Verdict:
    """How a topology compares: the worst difference of each kind, and where the first arises.

    crash: the first line of the error with which it ended; then nothing was compared.
    """

    point: Point
    loss: float = math.inf
    norm: float = math.inf
    weight: float = math.inf
    limits: Limits = Limits()
    where: str = ""
    crash: str = ""

    @property
    def passed(self) -> bool:
        """Whether all is within tolerance. Not a number is a difference."""
        return (
            not self.crash
            and self.loss <= self.limits.loss
            and self.norm <= self.limits.norm
            and self.weight <= self.limits.weight
        )


def compare(
    point: Point, references: Sequence[Figures], found: Figures, reordered: Sequence[Figures] = ()
) -> Verdict:
    """The worst differences of `found`, and where the first arises if they are too large.

    Of several references, which only rounding puts apart, the mean is compared with, and how far
    they are from it is what may be rounding. reordered: of one reference, the same run with sums in
    other orders: a weight may be as far off as rounding alone takes that very parameter. The
    verdict's weight is then the one nearest to its limit, or farthest beyond it.
    """
    reference, limits = mean_of(references)
    loss, norm, weight = _distances(reference, found)
    if reordered:
        distances = _weight_distance(reference.last, found.last)
        allowed = _rounding(reference, reordered)
        name = max(distances, key=lambda key: distances[key] / allowed[key])
        weight, limits = distances[name], replace(limits, weight=allowed[name])
    verdict = Verdict(point, loss, norm, weight, limits)
    if verdict.passed:
        return verdict
    where = _first_difference(reference, found, limits)
    return Verdict(point, loss, norm, weight, limits, where)


def mean_of(references: Sequence[Figures]) -> tuple[Figures, Limits]:
    """The mean of `references`, and the limits that follow from how far apart they are."""
    if len(references) == 1:
        return references[0], Limits()
    centre = Figures(
        _mean_by_step([r.losses for r in references]),
        _mean_by_step([r.norms for r in references]),
        _mean([r.layers for r in references]),
        _mean([r.first for r in references]),
        _mean([r.last for r in references]),
    )
    distances = [_distances(centre, reference) for reference in references]
    loss, norm, weight = (_SPREADS * max(kind) for kind in zip(*distances, strict=True))
    return centre, Limits(loss, norm, weight, layer=2e-2)


def _rounding(reference: Figures, reordered: Sequence[Figures]) -> dict[str, float]:
    """How far each parameter may be off."""
    floors = [_weight_distance(reference.last, other.last) for other in reordered]
    return {
        name: max(WEIGHT_TOLERANCE, ROUNDING * max(floor[name] for floor in floors))
        for name in reference.last
    }


def _mean_by_step(runs: Sequence[Sequence[float]]) -> list[float]:
    return [sum(values) / len(runs) for values in zip(*runs, strict=True)]


def _mean(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}


def _distances(reference: Figures, found: Figures) -> tuple[float, float, float]:
    """Of the loss and the norm at the worst step, and of the worst weight at the end."""
    return (
        max(_distance(a, b) for a, b in zip(reference.losses, found.losses, strict=True)),
        max(_distance(a, b) / a for a, b in zip(reference.norms, found.norms, strict=True)),
        max(_weight_distance(reference.last, found.last).values()),
    )


def _distance(first: float, second: float) -> float:
    distance = abs(first - second)
    return distance if distance == distance else float("inf")


def _weight_distance(
    reference: dict[str, torch.Tensor], found: dict[str, torch.Tensor]
) -> dict[str, float]:
    return {
        name: _distance(float((found[name] - weight).abs().max()), 0.0)
        if name in found and found[name].shape == weight.shape
        else float("inf")
        for name, weight in reference.items()
    }


def _first_difference(reference: Figures, found: Figures, limits: Limits) -> str:
    for name, expected in reference.layers.items():
        seen = found.layers.get(name)
        if seen is None or _distance(seen, expected) > limits.layer * expected:
            return f"the output of {name}, in the forward pass"
    if _distance(reference.losses[0], found.losses[0]) > limits.loss:
        return "after the last layer: norm, head or loss"
    distances = _weight_distance(reference.first, found.first)
    name = max(distances, key=lambda key: distances[key])
    if distances[name] > limits.weight:
        return f"the gradient of {name}, in the backward pass of the first step"
    return "after the first step: gradient norm, clipping or optimizer"
