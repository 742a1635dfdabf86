"""Parallel degrees, the rank's coordinates on each axis, and the groups of ranks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bigtrain.errors import Problem
from bigtrain.settings.degrees import AXES, REPLICA_AXES, Axis, Degrees
from bigtrain.settings.run_config import ParallelSection
from bigtrain.settings.sections.base import nearest_multiples


@dataclass(frozen=True)
class Coordinates:
    """The coordinates of a rank on the axes of a topology."""

    data_rank: int
    pipeline_rank: int
    sequence_rank: int
    tensor_rank: int

    def is_first(self, *ignored: Axis) -> bool:
        """Return whether the rank has coordinate 0 on all axes except `ignored`: a single one of
        the ranks with equal results."""
        return not any(getattr(self, f"{axis}_rank") for axis in AXES if axis not in ignored)


@dataclass(frozen=True, kw_only=True)
class Topology(Degrees):
    """Degrees of parallelism, the coordinates of ranks, and their groups."""

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of `rank`; the last of `AXES` varies fastest."""
        assert 0 <= rank < self.world_size
        ranks = {}
        for axis in reversed(AXES):
            rank, ranks[f"{axis}_rank"] = divmod(rank, self.size(axis))
        return Coordinates(**ranks)

    def describe(self) -> str:
        """Degrees and the order of ranks, as a human-readable line; empty for a single rank."""
        if self.world_size == 1:
            return ""
        axes = [axis for axis in AXES if axis == "data" or self.size(axis) > 1]  # data comes first
        degrees = " x ".join(f"{self.size(axis)} {axis}" for axis in axes)
        formula: str = axes[0]
        for axis in axes[1:]:
            formula = f"({formula})" if formula != axes[0] else formula
            formula = f"{formula} * {self.size(axis)} + {axis}"
        experts = "" if self.expert_size == 1 else f"; {self.expert_size} divide the experts"
        return f"{self.world_size} ranks = {degrees}-parallel{experts}; rank = {formula}"

    def crossings(self, hosts: Sequence[str]) -> list[str]:
        """Return human-readable lines on the groups that communicate in every layer and yet span
        several hosts. `hosts`: the host of each rank."""
        lines = []
        layerwise = {
            "tensor": self.groups("tensor"),
            "sequence": self.groups("sequence"),
            "expert": self.expert_groups(),
        }
        for axis, groups in layerwise.items():
            crossing = [group for group in groups if len({hosts[rank] for rank in group}) > 1]
            if crossing:
                ranks = ", ".join(map(str, crossing[0]))
                group_hosts = ", ".join(dict.fromkeys(hosts[rank] for rank in crossing[0]))
                lines.append(
                    f"{len(crossing)} {axis}-parallel groups are on several hosts (ranks {ranks} "
                    f"on {group_hosts}) and exchange in every layer -> set parallel.{axis} to a "
                    "divisor of the number of ranks per host"
                )
        return lines

    def groups(self, *axes: Axis) -> list[list[int]]:
        """Return the groups of ranks that differ along `axes` only, each in ascending order; every
        rank is in one group.

        ``groups("tensor")`` are the tensor-parallel groups, ``groups(*REPLICA_AXES)`` hold
        equal parameters.
        """
        other_axes = [axis for axis in AXES if axis not in axes]
        # The ranks of a group, by their equal coordinates on the other axes.
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            coordinates = self.coordinates(rank)
            key = tuple(getattr(coordinates, f"{axis}_rank") for axis in other_axes)
            groups.setdefault(key, []).append(rank)
        return list(groups.values())

    def ulysses_groups(self) -> list[list[int]]:
        """Return the groups of ranks that share samples and divide the heads: neighbors within the
        sequence-parallel group."""
        size = self.ulysses_size
        return [
            group[first : first + size]
            for group in self.groups("sequence")
            for first in range(0, len(group), size)
        ]

    def ring_groups(self) -> list[list[int]]:
        """Return the groups of ranks that pass keys and values of the same heads around."""
        size = self.ulysses_size
        return [
            group[ulysses_rank::size]
            for group in self.groups("sequence")
            for ulysses_rank in range(size)
        ]

    def expert_groups(self) -> list[list[int]]:
        """Return the groups of ranks that divide the experts: neighbours within data x sequence."""
        size = self.expert_size
        return [
            group[first : first + size]
            for group in self.groups(*REPLICA_AXES)
            for first in range(0, len(group), size)
        ]

    def expert_replica_groups(self) -> list[list[int]]:
        """Return the groups of ranks that hold equal experts."""
        size = self.expert_size
        return [
            group[expert_rank::size]
            for group in self.groups(*REPLICA_AXES)
            for expert_rank in range(size)
        ]

    def holder_groups(self) -> list[list[int]]:
        """Return the groups of ranks that together hold the parameters of a pipeline stage, except
        its experts."""
        return self.groups(*REPLICA_AXES, "tensor")

    def expert_holder_groups(self) -> list[list[int]]:
        """Return the groups of ranks that together hold the same experts."""
        expert_ranks = {rank: group.index(rank) for group in self.expert_groups() for rank in group}
        return [
            [rank for rank in group if expert_ranks[rank] == expert_rank]
            for group in self.holder_groups()
            for expert_rank in range(self.expert_size)
        ]


def derive_topology(
    parallel: ParallelSection, world_size: int
) -> tuple[Topology | None, list[Problem]]:
    """Return the topology of `world_size` ranks, or the reason why there is none."""
    degrees = parallel.degrees
    replica_size = degrees.replica_size
    if world_size % replica_size:
        nearest = nearest_multiples(world_size, replica_size)
        factors = degrees.factors
        rule = (
            f"must be a multiple of parallel.{' x '.join(factors)} = "
            f"{' x '.join(map(str, factors.values()))} = {replica_size}"
        )
        # Without the degrees any world is legal, and a checkpoint does not depend on them.
        overrides = " ".join(f"parallel.{name}=1" for name, size in factors.items() if size > 1)
        remedy = (
            f"start {nearest} processes, or set {overrides}, which resumes the same checkpoints"
        )
        return None, [Problem("world size", world_size, rule, remedy)]
    return Topology.of_world(world_size, degrees), []
