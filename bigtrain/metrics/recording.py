"""Metrics that user code records in a run: `record`, and the sums of a rank between logged steps.

Values of all ranks are joined when a step is logged (`bigtrain.run.callbacks`), by the reduction of
the metric: the mean of all recorded values, their sum, maximum or minimum.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, get_args

Reduction = Literal["mean", "sum", "max", "min"]
"""Joins values that were recorded under one name, over steps and ranks."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]*")
_MAX_NAMES = 256


def record(name: str, value: Any, reduce: Reduction = "mean", weight: float = 1.0) -> None:
    """Record a value of the step that this rank trains; ``recorded/NAME`` of the next logged step.
    In an evaluation: of the held-out samples; ``held_out_NAME`` of that evaluation.

    Call it on any rank while a run trains: in a callback, a model's forward pass, an objective.
    Ranks need not record the same names. Elsewhere (samples from prompts, trials before a run,
    other programs) it does nothing. No collective. The loss of an objective is recorded once for
    each sample, also where several ranks compute the same; recomputation of a forward pass records
    nothing. Ranks that divide a sample each record their part in a forward pass.

    value: a number, or a tensor with one element; a tensor stays on its device until a step is
    logged. reduce: over all values since the last logged step, of all ranks: their "mean", "sum",
    "max" or "min". weight: of the value in a mean. Raises ValueError for a name, value or reduction
    that cannot be recorded.
    """
    recorder = _current.get()
    if recorder is not None:
        recorder.add(name, value, reduce, weight)


@contextmanager
def recording_if(counts: bool) -> Iterator[None]:
    """Make `record` do nothing inside the block unless `counts`: for code that several ranks call
    with equal values, or that is called a second time."""
    token = _current.set(_current.get() if counts else None)
    try:
        yield
    finally:
        _current.reset(token)


@dataclass(frozen=True)
class Recorded:
    """Values that a rank recorded under a name. total: the weighted sum, the sum, the maximum or
    the minimum, by `reduce`. weight: sum of the weights."""

    reduce: Reduction
    total: float
    weight: float

    def joined(self, peer: Recorded) -> Recorded:
        """Return the values of both ranks together."""
        total = _join(self.reduce, self.total, peer.total)
        return Recorded(self.reduce, total, self.weight + peer.weight)

    @property
    def value(self) -> float:
        """The metric."""
        return self.total / self.weight if self.reduce == "mean" else self.total


class Recorder:
    """Values that this rank has recorded since they were last taken."""

    def __init__(self) -> None:
        # By name of a metric: how its values are joined, the joined values (a sum for the mean),
        # and the sum of their weights.
        self._reductions: dict[str, Reduction] = {}
        self._totals: dict[str, Any] = {}
        self._weights: dict[str, float] = {}

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Make `record` add to this recorder inside the block."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def add(self, name: str, value: Any, reduce: Reduction, weight: float) -> None:
        """Add a value. Raises ValueError as `record`."""
        if reduce not in get_args(Reduction):
            raise ValueError(
                f"record({name!r}): reduce = {reduce!r} is not one of mean, sum, max, min"
            )
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"record({name!r}): a name has letters, digits and _ . / -")
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"record({name!r}): weight = {weight} is not a positive number")
        value = _as_scalar(name, value)
        first_reduce = self._reductions.setdefault(name, reduce)
        if first_reduce != reduce:
            raise ValueError(
                f"record({name!r}): reduce = {reduce!r}, and before it was {first_reduce!r}"
            )
        if len(self._reductions) > _MAX_NAMES:
            raise ValueError(f"record({name!r}): more than {_MAX_NAMES} names in a logged step")
        value = value * weight if reduce == "mean" else value
        total = self._totals.get(name)
        self._totals[name] = value if total is None else _join(reduce, total, value)
        self._weights[name] = self._weights.get(name, 0.0) + weight

    def take(self) -> dict[str, Recorded]:
        """Return the values by name, and forget them. Waits for the devices of tensors."""
        recorded = {
            name: Recorded(self._reductions[name], float(total), self._weights[name])
            for name, total in self._totals.items()
        }
        self.clear()
        return recorded

    def clear(self) -> None:
        """Forget all values, after `take` or a roll back."""
        self._reductions, self._totals, self._weights = {}, {}, {}


def joined(ranks: Sequence[Mapping[str, Recorded]]) -> dict[str, float]:
    """Return the metrics over the `ranks`, by name. Raises ValueError if two ranks reduce a name in
    different ways."""
    totals: dict[str, Recorded] = {}
    for rank, rank_values in enumerate(ranks):
        for name, recorded in rank_values.items():
            total = totals.get(name)
            if total is None:
                totals[name] = recorded
                continue
            if total.reduce != recorded.reduce:
                raise ValueError(
                    f"record({name!r}): reduce = {recorded.reduce!r} on rank {rank}, and "
                    f"{total.reduce!r} on another"
                )
            totals[name] = total.joined(recorded)
    return {name: totals[name].value for name in sorted(totals)}


_current: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


def _as_scalar(name: str, value: Any) -> Any:
    """Return a number as float, a tensor as a scalar tensor in float64 without a graph."""
    if isinstance(value, (bool, int, float)):
        return float(value)
    if not hasattr(value, "detach"):
        try:
            return float(value)
        except (TypeError, ValueError):
            raise ValueError(f"record({name!r}): {type(value).__name__} is not a number") from None
    if value.numel() != 1:
        shape = list(value.shape)
        raise ValueError(f"record({name!r}): a tensor of shape {shape} is not one number")
    return value.detach().reshape(()).double()


def _join(reduce: Reduction, first: Any, second: Any) -> Any:
    """Return the total of two totals, or of a total and a value."""
    if reduce in ("mean", "sum"):
        return first + second
    if isinstance(first, float) and isinstance(second, float):
        return max(first, second) if reduce == "max" else min(first, second)
    # Tensors stay on their devices.
    takes_first = first > second if reduce == "max" else first < second
    return first if takes_first else second
