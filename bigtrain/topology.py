"""Who computes what: parallel degrees, and how the global batch falls to processes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bigtrain.config import BatchSection, ParallelSection
from bigtrain.errors import Problem
from bigtrain.legality.facts import largest_divisor

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
    """Degrees of parallelism. `world_size` is their product with `data_size`."""

    world_size: int
    data_size: int
    tensor_size: int = 1
    pipeline_size: int = 1
    sequence_size: int = 1

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
        """Degrees and the order of ranks, as a line for people; empty for one process."""
        if self.world_size == 1:
            return ""
        axes = [axis for axis in AXES if axis == "data" or self.size(axis) > 1]
        degrees = " x ".join(f"{self.size(axis)} {axis}" for axis in axes)
        place: str = axes[0]
        for axis in axes[1:]:
            place = f"({place})" if place != axes[0] else place
            place = f"{place} * {self.size(axis)} + {axis}"
        return f"{self.world_size} processes = {degrees}-parallel; rank = {place}"

    def crossings(self, hosts: Sequence[str]) -> list[str]:
        """Lines for people on groups that exchange in every layer and are on several of `hosts`,
        the host of each rank."""
        found = []
        layerwise: tuple[Axis, ...] = ("tensor", "sequence")
        for axis in layerwise:
            over = [g for g in self.groups(axis) if len({hosts[rank] for rank in g}) > 1]
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


@dataclass(frozen=True)
class BatchPlan:
    """How one optimizer step's samples are divided.

    Sample ``global_samples * step + (micro_step * data_size + data_rank) * micro_samples + j`` is
    row ``j`` of the micro-batch, so the samples of a step never depend on the division.
    """

    global_samples: int
    micro_samples: int
    data_size: int
    accumulation: int
    sequence_length: int

    @property
    def tokens_per_step(self) -> int:
        return self.global_samples * self.sequence_length

    def equation(self) -> str:
        """The arithmetic as one line for people."""
        return (
            f"{self.global_samples} samples per step = {self.micro_samples} per micro-batch x "
            f"{self.data_size} data-parallel x {self.accumulation} accumulation; "
            f"{self.tokens_per_step} tokens per step = {self.global_samples} samples x "
            f"{self.sequence_length} tokens"
        )


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
        world_size, world_size // inner, parallel.tensor, parallel.pipeline, parallel.sequence
    )
    return topology, []


def plan_batch(batch: BatchSection, data_size: int) -> tuple[BatchPlan | None, list[Problem]]:
    """Derive accumulation from the global batch, or say which batch would divide."""
    samples = batch.samples_per_step
    per_pass = batch.micro_samples * data_size
    if samples % per_pass:
        below = samples // per_pass * per_pass
        nearest = f"{below} or {below + per_pass}" if below else str(per_pass)
        key, unit = "batch.global_samples", 1
        if batch.global_tokens is not None:
            key, unit = "batch.global_tokens", batch.sequence_length
            nearest = " or ".join(str(int(n) * unit) for n in nearest.split(" or "))
        rule = (
            f"must be a multiple of batch.micro_samples x data-parallel size = "
            f"{batch.micro_samples} x {data_size} = {per_pass}"
            + (f" samples = {per_pass * unit} tokens" if unit > 1 else "")
        )
        fitting = (
            largest_divisor(samples // data_size, batch.micro_samples)
            if (samples % data_size == 0)
            else None
        )
        remedy = f"nearest: {nearest}" + (f", or batch.micro_samples: {fitting}" if fitting else "")
        return None, [Problem(key, samples * unit, rule, remedy)]
    plan = BatchPlan(
        samples, batch.micro_samples, data_size, samples // per_pass, batch.sequence_length
    )
    return plan, []
