"""Expert load of a step, router losses of a micro-batch (auxiliary loss and z-loss), and selection
biases: they affect the choice of experts, not their weights (Wang et al. 2024, arXiv 2408.15664,
algorithm 1; DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from bigtrain.engine.optimizers.exact_parameters import ExactParameters
from bigtrain.engine.startup.mesh import Mesh
from bigtrain.models.experts import (
    ExpertCounts,
    Routing,
    auxiliary_loss,
    balance_loss,
    exchange_of,
    router_logits_of,
    selection_biases,
    z_loss,
)
from bigtrain.settings.sections.model import MoeSection

if TYPE_CHECKING:
    from bigtrain.models.parallel.collectives import Traffic


@dataclass(frozen=True)
class ExpertLoadStats:
    """Load of the experts in one step, equal on every rank. imbalance: by module of experts, tokens
    of the busiest expert over the mean, in the global batch. sent_bytes: sent by a rank to other
    ranks in exchanges of tokens and gradients; seconds: duration of the exchanges with waiting;
    both are means over all ranks, None without expert parallelism."""

    imbalance: dict[str, float]
    sent_bytes: float | None = None
    seconds: float | None = None


class ExpertLoad:
    """Measured load of the experts of an engine's `model`. The constructor is collective over
    `mesh.pipeline`. is_compiled: whether the model's layers are compiled."""

    def __init__(
        self, model: nn.Module, mesh: Mesh, device: torch.device, *, is_compiled: bool
    ) -> None:
        self._mesh, self._device = mesh, device
        self.counts = ExpertCounts(model, is_compiled=is_compiled)
        counts_of_stages: list[Any] = [self.counts.num_experts]
        if mesh.topology.pipeline_size > 1:
            counts_of_stages = [None] * mesh.topology.pipeline_size
            dist.all_gather_object(counts_of_stages, self.counts.num_experts, group=mesh.pipeline)
        self._num_experts: dict[str, int] = {}  # by module, in all pipeline stages
        for num_experts_by_module in counts_of_stages:
            self._num_experts |= num_experts_by_module
        self._traffic: list[Traffic] = []
        if mesh.topology.expert_size > 1:
            from bigtrain.models.parallel.collectives import GroupRows

            exchanges = {exchange_of(module) for module in self.counts.modules.values()}
            self._traffic = [
                exchange.traffic for exchange in exchanges if isinstance(exchange, GroupRows)
            ]

    def begin_step(self, *, counting: bool, measuring: bool) -> None:
        """Begin a step; `counting`: whether to count its tokens, `measuring`: its exchanges."""
        self.counts.begin(counting=counting)
        for traffic in self._traffic:
            traffic.begin(measuring=measuring)

    def of_replicas(self, name: str) -> torch.Tensor:
        """Return the tokens of the global batch so far that chose each expert of this stage's
        module `name`, int64 [experts]. Collective over the mesh's replicas; does not wait for the
        device."""
        total = self.counts.of(name, self._device).clone()
        dist.all_reduce(total, group=self._mesh.replicas)
        return total

    def read(self) -> ExpertLoadStats | None:
        """Return the load of the counted step; None without experts. Collective over all ranks;
        waits for the device."""
        if not self._num_experts:
            return None
        # One sum over all ranks: tokens of the experts of all modules, sent bytes and seconds.
        sizes = list(self._num_experts.values())
        totals = torch.zeros(sum(sizes) + 2, dtype=torch.float64, device=self._device)
        tokens_by_module = dict(zip(self._num_experts, totals[:-2].split(sizes), strict=True))
        # Tensor-parallel ranks have equal tokens, so the first rank counts.
        if self._mesh.coordinates.tensor_rank == 0:
            for name in self.counts.modules:
                tokens_by_module[name].copy_(self.counts.of(name, self._device))
        totals[-2] = sum(traffic.sent_bytes for traffic in self._traffic)
        totals[-1] = sum(traffic.seconds() for traffic in self._traffic)
        dist.all_reduce(totals)
        host_totals = totals.cpu()
        imbalance = {
            name: float(tokens.max() / tokens.mean().clamp(min=1e-300))  # 0 without any token
            for name, tokens in zip(self._num_experts, host_totals[:-2].split(sizes), strict=True)
        }
        if self._mesh.topology.expert_size == 1:
            return ExpertLoadStats(imbalance)
        sent_bytes, seconds = (host_totals[-2:] / dist.get_world_size()).tolist()
        return ExpertLoadStats(imbalance, sent_bytes, seconds)


class RouterLosses:
    """Weighted auxiliary loss of a run's routers, for a micro-batch at a time.

    ``auxiliary_loss: global_batch`` is transformers' formula with the fractions of tokens per
    expert taken over the global batch (Qiu et al. 2025, arXiv 2501.11873, equation 4), as far as it
    is computed: the micro-batches of all ranks up to the current one. Makes `model` return router
    logits if `section` needs them.
    """

    def __init__(self, model: nn.Module, section: MoeSection, replicas: dist.ProcessGroup) -> None:
        config: Any = model.config
        is_on = bool(getattr(config, "output_router_logits", True))
        coefficient = getattr(config, "router_aux_loss_coef", 0.0) or 0.0
        self.aux_coefficient = float(coefficient) if is_on else 0.0
        self._section, self._replicas = section, replicas
        self._top_k = int(getattr(config, "num_experts_per_tok", 0) or 0)
        # In the step so far: tokens of every expert, and rows of router logits (tokens times
        # layers) in the last element.
        self._counts: torch.Tensor | None = None
        if section.z_loss_coefficient:
            config.output_router_logits = True

    def begin_step(self) -> None:
        """Begin an optimizer step."""
        self._counts = None

    def of(self, outputs: Any) -> torch.Tensor | None:
        """Return the router loss from a model's outputs for a micro-batch; None if nothing is
        added. Collective over the replicas with ``auxiliary_loss: global_batch``."""
        total = None
        section = self._section
        if section.auxiliary_loss == "global_batch":
            routing = Routing.of(router_logits_of(outputs), self._top_k)
            # Add this micro-batch on all replicas to the counts of the step.
            num_rows = routing.expert_tokens.new_full((1,), routing.num_rows)
            counts = torch.cat([routing.expert_tokens, num_rows])
            dist.all_reduce(counts, group=self._replicas)
            self._counts = counts if self._counts is None else self._counts + counts
            fractions = self._counts[:-1] / self._counts[-1]
            total = self.aux_coefficient * balance_loss(fractions, routing.probabilities)
        elif (model_loss := auxiliary_loss(outputs)) is not None and self.aux_coefficient:
            total = self.aux_coefficient * model_loss
        if section.z_loss_coefficient:
            weighted = section.z_loss_coefficient * z_loss(router_logits_of(outputs))
            total = weighted if total is None else total + weighted
        return total


class BiasUpdate:
    """Update of the biases by which tokens of `model` choose experts. Biases are float32 also if
    parameters have 16 bits: buffers are converted here, parameters have values in `exact`. rate:
    size of an update; 0: no updates."""

    def __init__(
        self, model: nn.Module, load: ExpertLoad, rate: float, exact: ExactParameters
    ) -> None:
        self.rate = rate
        self._load = load
        self._biases: dict[str, torch.Tensor] = {}
        # Without other parameters, which the optimizer trains or which stay as they are.
        for bias in selection_biases(model, exact.values.keys()):
            if not bias.is_parameter:
                bias.tensor.data = bias.tensor.data.float()
            if rate:
                exact_value = exact.values.get(bias.name)
                self._biases[bias.experts] = bias.tensor if exact_value is None else exact_value
                exact.owned.update({bias.name} & exact.values.keys())

    @torch.no_grad()
    def update(self) -> None:
        """Update the biases after an update of the parameters: raise the biases of experts with
        fewer tokens of the global batch than the mean, and lower the biases of experts with more.
        Collective over the replicas."""
        for name, bias in self._biases.items():
            # b += rate * sign(mean count - count)
            counts = self._load.of_replicas(name).double()
            change = self.rate * torch.sign(counts.mean() - counts)
            bias += change.to(bias.dtype).view_as(bias)
