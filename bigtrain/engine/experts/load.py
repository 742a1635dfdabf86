"""Which experts the tokens of a step go to, and what it costs to bring them there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bigtrain.engine.startup.mesh import Mesh
from bigtrain.models.experts.counts import ExpertCounts
from bigtrain.models.parallel.collectives import GroupRows
from bigtrain.models.parallel.experts import exchange_of


@dataclass(frozen=True)
class LoadFigures:
    """Load of the experts in one step, the same on every rank.

    imbalance: by name of a module of experts, tokens of its busiest expert over the mean of its
    experts, in the global batch: 1 if all have equally many. sent_bytes: what a rank sends to
    others in exchanges of tokens and of their gradients; seconds: the time of these, waiting
    included; both are means over all ranks, None without expert parallelism.
    """

    imbalance: dict[str, float]
    sent_bytes: float | None = None
    seconds: float | None = None


class ExpertLoad:
    """Counts for an engine's `model`. The constructor is collective over `mesh.pipeline`.

    is_compiled: then nothing is counted (`ExpertCounts`).
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, device: torch.device, *, is_compiled: bool
    ) -> None:
        self._mesh, self._device = mesh, device
        self.counts = ExpertCounts(nn.Module() if is_compiled else model)
        stages: list[Any] = [self.counts.num_experts]
        if mesh.topology.pipeline_size > 1:
            stages = [None] * mesh.topology.pipeline_size
            dist.all_gather_object(stages, self.counts.num_experts, group=mesh.pipeline)
        self._num_experts: dict[str, int] = {k: v for stage in stages for k, v in stage.items()}
        exchanges = {exchange_of(module) for module in self.counts.modules.values()}
        self._traffic = [e.traffic for e in exchanges if isinstance(e, GroupRows)]

    def begin_step(self, *, counting: bool, measuring: bool) -> None:
        """Begin a step; `counting`: whether to count its tokens, `measuring`: its exchanges."""
        self.counts.begin(counting=counting)
        for traffic in self._traffic:
            traffic.begin(measuring=measuring)

    def of_replicas(self, name: str) -> torch.Tensor:
        """Tokens of the global batch so far that chose each expert of this stage's module `name`,
        int64 [experts]. Collective over the mesh's replicas; does not wait for the device."""
        total = self.counts.of(name, self._device).clone()
        dist.all_reduce(total, group=self._mesh.replicas)
        return total

    def read(self) -> LoadFigures | None:
        """The load of the counted step; None without experts. Collective over all ranks; waits for
        the device."""
        if not self._num_experts:
            return None
        sizes = list(self._num_experts.values())
        totals = torch.zeros(sum(sizes) + 2, dtype=torch.float64, device=self._device)
        parts = dict(zip(self._num_experts, totals[:-2].split(sizes), strict=True))
        # Ranks that divide tensors have the same tokens.
        for name in self.counts.modules if self._mesh.coordinates.tensor_rank == 0 else ():
            parts[name].copy_(self.counts.of(name, self._device))
        totals[-2] = sum(traffic.sent_bytes for traffic in self._traffic)
        totals[-1] = sum(traffic.seconds() for traffic in self._traffic)
        dist.all_reduce(totals)
        found = totals.cpu()
        imbalance = {
            name: float(part.max() / part.mean().clamp(min=1e-300))
            for name, part in zip(self._num_experts, found[:-2].split(sizes), strict=True)
        }
        if self._mesh.topology.expert_size == 1:
            return LoadFigures(imbalance)
        sent_bytes, seconds = (found[-2:] / dist.get_world_size()).tolist()
        return LoadFigures(imbalance, sent_bytes, seconds)
