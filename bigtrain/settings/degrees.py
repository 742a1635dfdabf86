"""Parallel degrees and their products, listed only here. Pure.

A new degree is a field here and a key in section ``parallel`` of the run YAML; one that divides the
world is an axis too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from math import isqrt, prod
from operator import attrgetter
from typing import Any, Literal, Self, get_args

Axis = Literal["data", "pipeline", "sequence", "tensor"]

AXES: tuple[Axis, ...] = get_args(Axis)
"""From outermost to innermost. Tensor-parallel ranks communicate most and are neighbours, so that a
group of them stays on one host; data-parallel ranks communicate once a step."""

REPLICA_AXES: tuple[Axis, ...] = ("data", "sequence")
"""Axes along which ranks hold equal parameters, except experts; ZeRO partitions over these axes."""

MODEL_AXES: tuple[Axis, ...] = tuple(axis for axis in AXES if axis not in REPLICA_AXES)
"""Axes along which ranks hold different parameters of one copy of the model."""


@dataclass(frozen=True, kw_only=True)
class ModelDegrees:
    """Numbers of ranks that share one replica of the model, by axis.

    ring_size: the factor of `sequence_size` that passes keys around; the second factor, Ulysses,
    divides the heads. expert_size: ranks that share the experts, neighbors within data x sequence.
    It is not a factor of the world size, since these ranks also compute different samples.
    """

    tensor_size: int = 1
    pipeline_size: int = 1
    sequence_size: int = 1
    ring_size: int = 1
    expert_size: int = 1

    @property
    def ulysses_size(self) -> int:
        """Ranks that share samples and divide the heads."""
        return self.sequence_size // self.ring_size

    @property
    def replica_size(self) -> int:
        """Ranks that share one replica of the model."""
        return prod(_inner_sizes(self))

    @property
    def factors(self) -> dict[str, int]:
        """The degrees that divide the world, by axis, in the order of the fields."""
        names = (field.name.removesuffix("_size") for field in _MODEL_FIELDS)
        return {name: getattr(self, f"{name}_size") for name in names if name in AXES}

    def model_degrees(self) -> dict[str, Any]:
        """Return the degrees by name, as keyword arguments, without the data-parallel one."""
        return {field.name: getattr(self, field.name) for field in _MODEL_FIELDS}


_MODEL_FIELDS = fields(ModelDegrees)

MODEL_DEGREES: tuple[str, ...] = tuple(field.name for field in _MODEL_FIELDS)
"""Fields of `ModelDegrees`, in the order in which people read them."""


def _size_getter(axes: Iterable[Axis]) -> Callable[[object], tuple[int, ...]]:
    return attrgetter(*(f"{axis}_size" for axis in axes))


_inner_sizes = _size_getter(axis for axis in AXES if axis != "data")
_model_sizes = _size_getter(MODEL_AXES)
_replica_sizes = _size_getter(REPLICA_AXES)


def replicas_in_world(degrees: object, world_size: int) -> int:
    """Return the number of ranks over which ZeRO partitions; 0 if the degrees do not divide the
    world. `degrees`: any object with attributes such as tensor_size; faster than making
    `Degrees`."""
    if world_size % prod(_inner_sizes(degrees)):
        return 0
    return world_size // prod(_model_sizes(degrees))


@dataclass(frozen=True, kw_only=True)
class Degrees(ModelDegrees):
    """Numbers of ranks on all axes. ZeRO partitions over `REPLICA_AXES`."""

    data_size: int = 1

    @classmethod
    def of_world(cls, world_size: int, model: ModelDegrees) -> Self:
        """Return the degrees of `world_size` ranks, a multiple of the replica size."""
        return cls(data_size=world_size // model.replica_size, **model.model_degrees())

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.data_size * self.replica_size

    @property
    def partition_size(self) -> int:
        """Ranks over which ZeRO partitions."""
        return prod(_replica_sizes(self))

    def size(self, axis: Axis) -> int:
        """Return the number of ranks along `axis`."""
        return int(getattr(self, f"{axis}_size"))

    def degrees(self) -> dict[str, Any]:
        """Return all degrees by name, as keyword arguments."""
        return {"data_size": self.data_size, **self.model_degrees()}


def largest_divisor(number: int, at_most: int) -> int:
    """Return the largest divisor of `number` up to `at_most`.

    Beyond 1e12 only divisors that have a factor up to 1e6 are searched, to bound the time.
    """
    small_divisors = [n for n in range(1, min(isqrt(number), 1_000_000) + 1) if number % n == 0]
    divisors = [*small_divisors, *(number // divisor for divisor in small_divisors)]
    return max(divisor for divisor in divisors if divisor <= at_most)
