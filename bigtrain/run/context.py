"""Context of a launch on a rank: settings, ranks, device and paths, inside its process group."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from bigtrain.engine.startup.long_work import LongWork
from bigtrain.run.health.fencing import RunClaim
from bigtrain.run.health.heartbeat import Heartbeat
from bigtrain.run.run_log import RunLog
from bigtrain.settings.batch_plan import BatchPlan
from bigtrain.settings.resolve import ResolvedRun
from bigtrain.settings.run_config import RunConfig
from bigtrain.settings.topology import Coordinates, Topology
from bigtrain.system.stop_signals import StopSignals
from bigtrain.system.world import World


@dataclass(frozen=True)
class RunContext:
    """Facts of a launch on this rank, for the launch's parts. hosts: of every rank. claim: on the
    run directory, acquired before the first write."""

    run: ResolvedRun
    world: World
    device: torch.device
    hosts: tuple[str, ...]
    long_work: LongWork
    signals: StopSignals
    claim: RunClaim
    log: RunLog
    heartbeat: Heartbeat = field(default_factory=Heartbeat)

    @property
    def config(self) -> RunConfig:
        return self.run.config

    @property
    def plan(self) -> BatchPlan:
        return self.run.plan

    @property
    def topology(self) -> Topology:
        return self.run.topology

    @property
    def directory(self) -> Path:
        """Run directory."""
        return self.claim.run_directory

    def seed_step(self, step: int) -> None:
        """Seed this rank's random generators for optimizer step `step`: dropout depends only on
        (seed, step) and the rank's coordinates, and a resumed run needs no generator states. Sites
        count as replicas."""
        coordinates = self.topology.coordinates(self.world.rank)
        reader_rank = self.plan.reader(coordinates.data_rank)  # counted over all sites
        coordinates = replace(coordinates, data_rank=reader_rank)
        torch.manual_seed(step_seed(self.config.seed, step, coordinates))


def step_seed(seed: int, step: int, coordinates: Coordinates) -> int:
    """Return the seed of optimizer step `step` on the rank at `coordinates` of a run seeded `seed`.
    Equal in a tensor-parallel group, different everywhere else."""
    key = f"{seed}:{step}:{coordinates.data_rank}"
    if coordinates.pipeline_rank or coordinates.sequence_rank:
        key += f":{coordinates.pipeline_rank}:{coordinates.sequence_rank}"
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # 63 bits: not negative for torch
