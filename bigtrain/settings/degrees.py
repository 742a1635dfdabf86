"""Parallel degrees and their products, listed only here. Pure.

A new degree is a field here and a key in section ``parallel`` of the run YAML.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isqrt
from typing import Any, Self


@dataclass(frozen=True, kw_only=True)
class ModelDegrees:
    """Numbers of ranks that share one replica of the model, by axis.

    expert_size: ranks that share the experts, neighbors within data x sequence. It is not a factor
    of the world size, since these ranks also compute samples of their own. ring_size: the factor of
    `sequence_size` that passes keys around; the other one, Ulysses, divides the heads.
    """

    tensor_size: int = 1
    pipeline_size: int = 1
    sequence_size: int = 1
    expert_size: int = 1
    ring_size: int = 1

    @property
    def ulysses_size(self) -> int:
        """Ranks that share samples and divide the heads."""
        return self.sequence_size // self.ring_size

    @property
    def replica_size(self) -> int:
        """Ranks that share one replica of the model."""
        return self.tensor_size * self.pipeline_size * self.sequence_size

    def model_degrees(self) -> dict[str, Any]:
        """Return the degrees by name, as keyword arguments, without the data-parallel one."""
        return {field.name: getattr(self, field.name) for field in _MODEL_FIELDS}


_MODEL_FIELDS = fields(ModelDegrees)


@dataclass(frozen=True, kw_only=True)
class Degrees(ModelDegrees):
    """Numbers of ranks on all axes. ZeRO partitions over data x sequence."""

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
        return self.data_size * self.sequence_size

    def degrees(self) -> dict[str, Any]:
        """Return all degrees by name, as keyword arguments."""
        return {"data_size": self.data_size, **self.model_degrees()}


def largest_divisor(number: int, at_most: int) -> int:
    """Return the largest divisor of `number` up to `at_most`.

    Beyond 1e12 only divisors that have a factor up to 1e6 are searched, to bound the time.
    """
    small = [n for n in range(1, min(isqrt(number), 1_000_000) + 1) if number % n == 0]
    return max(n for d in small for n in (d, number // d) if n <= at_most)
