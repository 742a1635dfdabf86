"""Who computes what: parallel degrees, and how the global batch falls to processes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bigtrain.errors import Problem
from bigtrain.settings.run_config import ParallelSection

Axis = Literal["data", "pipeline", "sequence", "tensor"]

AXES: tuple[Axis, ...] = ("data", "pipeline", "sequence", "tensor")
"""From outermost to innermost. Tensor-parallel processes exchange most and are neighbours, so that
a group of them stays on one host; replicas exchange once a step."""


@dataclass(frozen=True)
class Coordinates:
    """Where a process stands on each axis of a topology."""

    data_rank: int
    pipeline_rank: int
    sequence_rank: int
    tensor_rank: int


@dataclass(frozen=True)
class Topology:
    """Degrees of parallelism. `world_size` is their product with `data_size`.

    expert_size: neighbours among the ranks of data x sequence that divide the experts; no factor
    of the world, for these ranks compute samples of their own.
    """

    world_size: int
    data_size: int
    tensor_size: int = 1
    pipeline_size: int = 1
    sequence_size: int = 1
    expert_size: int = 1

    def size(self, axis: Axis) -> int:
        """Processes along `axis`."""
        return int(getattr(self, f"{axis}_size"))

    def coordinates(self, rank: int) -> Coordinates:
        """Where process `rank` stands: ``rank = ((data * pipeline_size + pipeline) *
        sequence_size + sequence) * tensor_size + tensor``."""
        assert 0 <= rank < self.world_size
        found = {}
        for axis in reversed(AXES):
            rank, found[f"{axis}_rank"] = divmod(rank, self.size(axis))
        return Coordinates(**found)

    def describe(self) -> str:
        """Degrees and the order of ranks, as a human-readable line; empty for one process."""
        if self.world_size == 1:
            return ""
        axes = [axis for axis in AXES if axis == "data" or self.size(axis) > 1]
        degrees = " x ".join(f"{self.size(axis)} {axis}" for axis in axes)
        place: str = axes[0]
        for axis in axes[1:]:
            place = f"({place})" if place != axes[0] else place
            place = f"{place} * {self.size(axis)} + {axis}"
        experts = "" if self.expert_size == 1 else f"; {self.expert_size} divide the experts"
        return f"{self.world_size} processes = {degrees}-parallel{experts}; rank = {place}"

    def crossings(self, hosts: Sequence[str]) -> list[str]:
        """Lines for people on groups that exchange in every layer and are on several of `hosts`,
        the host of each rank."""
        found = []
        layerwise = {
            "tensor": self.groups("tensor"),
            "sequence": self.groups("sequence"),
            "expert": self.expert_groups(),
        }
        for axis, groups in layerwise.items():
            over = [g for g in groups if len({hosts[rank] for rank in g}) > 1]
            if over:
                ranks = ", ".join(map(str, over[0]))
                found.append(
                    f"{len(over)} {axis}-parallel groups are on several hosts (ranks {ranks} on "
                    f"{', '.join(dict.fromkeys(hosts[rank] for rank in over[0]))}) and exchange in "
                    f"every layer -> set parallel.{axis} to a divisor of the processes of a host"
                )
        return found

    def groups(self, *axes: Axis) -> list[list[int]]:
        """The groups of ranks that differ along `axes` alone, each ascending; together the world.

        ``groups("tensor")`` are the tensor-parallel groups, ``groups("data", "sequence")`` those
        that hold the same parameters.
        """
        fixed = [f"{axis}_rank" for axis in AXES if axis not in axes]
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = self.coordinates(rank)
            groups.setdefault(tuple(getattr(place, name) for name in fixed), []).append(rank)
        return list(groups.values())

    def expert_groups(self) -> list[list[int]]:
        """The groups of ranks that divide the experts: neighbours within data x sequence."""
        size = self.expert_size
        return [
            group[first : first + size]
            for group in self.groups("data", "sequence")
            for first in range(0, len(group), size)
        ]

    def expert_replica_groups(self) -> list[list[int]]:
        """The groups of ranks that hold the same experts."""
        size = self.expert_size
        return [
            group[place::size] for group in self.groups("data", "sequence") for place in range(size)
        ]

    def holder_groups(self) -> list[list[int]]:
        """The groups of ranks that hold all of the same parameters together, but for experts."""
        return self.groups("data", "sequence", "tensor")

    def expert_holder_groups(self) -> list[list[int]]:
        """The groups of ranks that hold all of the same experts together."""
        places = {rank: group.index(rank) for group in self.expert_groups() for rank in group}
        return [
            [rank for rank in group if places[rank] == place]
            for group in self.holder_groups()
            for place in range(self.expert_size)
        ]


def derive_topology(
    parallel: ParallelSection, world_size: int
) -> tuple[Topology | None, list[Problem]]:
    """The topology of `world_size` processes, or the reason why there is none."""
    inner = parallel.tensor * parallel.pipeline * parallel.sequence
    if world_size % inner:
        below = world_size // inner * inner
        nearest = f"{below} or {below + inner}" if below else str(inner)
        rule = (
            f"must be a multiple of parallel.tensor x pipeline x sequence = {parallel.tensor} x "
            f"{parallel.pipeline} x {parallel.sequence} = {inner}"
        )
        return None, [Problem("world size", world_size, rule, f"start {nearest} processes")]
    topology = Topology(
        world_size,
        world_size // inner,
        parallel.tensor,
        parallel.pipeline,
        parallel.sequence,
        parallel.expert,
    )
    return topology, []
