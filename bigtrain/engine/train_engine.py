"""Optimizer step of one rank on a DeepSpeed engine, without pipeline stages, and the mean loss over
several steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.engine.deepspeed_patches.host_time import HostTime
from bigtrain.engine.deepspeed_patches.optimizers import inner_optimizer, refresh_parameters
from bigtrain.engine.deepspeed_patches.step import (
    has_overflowed,
    is_model_parallel,
    measured_norm,
    replace_clipping,
    scale_of_norm,
    scaled_loss,
    speed_patches_in_place,
)
from bigtrain.engine.experts import BiasUpdate, ExpertLoad, RouterLosses
from bigtrain.engine.first_gradients import FirstGradients
from bigtrain.engine.forward import ForwardPasses, ModelOptions
from bigtrain.engine.optimizers.build import set_learning_rate
from bigtrain.engine.optimizers.gradient_norm import clip_gradients, mark_gradients, total_norm
from bigtrain.engine.optimizers.skip_step import (
    SkipPolicy,
    SkipStepHook,
    StepStats,
    divisor,
    mean_loss,
)
from bigtrain.engine.optimizers.update_rule import RuleOptimizer
from bigtrain.engine.startup.mesh import Mesh
from bigtrain.metrics.recording import Recorded, Recorder, recording_if
from bigtrain.objectives.losses.next_token import NextTokenLoss
from bigtrain.settings.batch_plan import BatchPlan

# Arguments of `TrainEngine.on_phase`.
TEACHER_PASS = "forward pass of the teacher"
COUNTING_TARGETS = "counting target tokens"
FORWARD_PASS = "forward pass"
BACKWARD_PASS = "backward pass"
BOTH_PASSES = "forward and backward passes"
OPTIMIZER_UPDATE = "optimizer update"


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step; tensors stay on the device so that nothing waits for it.
    loss_sum: this rank's share of the summed loss, in nats. num_targets: target tokens of the
    global batch, or the sum of the tokens' weights, float64. stats: what the skip policy was
    called with; None without a policy."""

    loss_sum: torch.Tensor
    num_targets: torch.Tensor
    stats: StepStats | None = None


@dataclass(frozen=True)
class Evaluation:
    """Loss of held-out samples: the mean in nats per unit of the objective, such as a token; the
    bits are equal on all ranks. num_units: units over all ranks. recorded: metrics that this rank
    recorded in the passes, to be joined over the ranks."""

    loss: float
    num_units: int
    recorded: Mapping[str, Recorded]


class TrainEngine(ForwardPasses):
    """Engine that trains one model by optimizer steps. Every method is collective over all ranks.

    teach: adds the probabilities of a teacher in the run to a micro-batch that is trained on.
    on_phase: called with the name of the phase that begins, such as `FORWARD_PASS`.
    first_gradients: comparison of the first step with a probe. added_states: checkpoint contents
    other than masters and optimizer states, by parameter and state name: 1-D, for this rank's part
    of the master. host_time: time in DeepSpeed's hooks. expert_load: load in observed steps.
    """

    def __init__(
        self,
        engine: Any,
        plan: BatchPlan,
        device: torch.device,
        mesh: Mesh,
        options: ModelOptions,
        *,
        host_time: HostTime | None = None,
    ) -> None:
        super().__init__(engine, device, mesh, options)
        self._objective = options.objective
        self.plan = plan
        self.host_time = host_time or HostTime()
        self.teach: Callable[[MicroBatch], MicroBatch] | None = None
        self.on_phase: Callable[[str], object] = lambda _phase: None
        self.first_gradients = FirstGradients(self.module, options.unreached, mesh, device)
        self.added_states: dict[str, dict[str, torch.Tensor]] = {}
        self._router_losses = RouterLosses(self.module, options.moe, mesh.replicas)
        self.expert_load = ExpertLoad(self.module, mesh, device, is_compiled=options.is_compiled)
        self._sharded = [p for p in self.module.parameters() if is_model_parallel(p)]
        self._is_updated = True
        self._norm: torch.Tensor | None = None
        self._scale_of_norm = 1.0
        self._skip_hook = SkipStepHook(engine, self._norm_before_update)
        if isinstance(engine.optimizer, torch.optim.Optimizer):
            replace_clipping(engine, self._clip_gradients)
        self.exact = options.exact
        rate = options.moe.bias_update_rate
        self._bias = BiasUpdate(self.module, self.expert_load, rate, self.exact)
        self.exact.refresh(engine, self.module, mesh)

    @property
    def computes_entropy(self) -> bool:
        """Whether the loss is the cross-entropy of the next token."""
        return isinstance(self._objective, NextTokenLoss)

    @property
    def speed_patches(self) -> tuple[str, ...]:
        """Names of the parts of DeepSpeed that are replaced to save host time."""
        return speed_patches_in_place(self.engine)

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        lr: float,
        skip_policy: SkipPolicy | None = None,
        *,
        observe: bool = False,
    ) -> StepResult:
        """Do forward and backward of this rank's micro-batches, then one optimizer update.
        `micro_batches`: `plan.accumulation` micro-batches; `lr`: of this update; `skip_policy`:
        decides whether the update is made (the host then waits for the device); `observe`: whether
        `expert_load` will be read."""
        assert len(micro_batches) == self.plan.accumulation
        set_learning_rate(self.engine.optimizer, lr)
        if self.teach is not None:
            self.on_phase(TEACHER_PASS)
            micro_batches = [self.teach(batch) for batch in micro_batches]
        self.on_phase(COUNTING_TARGETS)
        num_targets = self._count_targets(micro_batches)
        # loss = sum over targets / number of targets. DeepSpeed divides the summed gradients by the
        # number of replicas, and counts the ranks that share a sample as replicas.
        scale = (dist.get_world_size(self.mesh.replicas) / divisor(num_targets)).float()
        loss_sum = torch.zeros((), device=self.device, dtype=torch.float32)
        if not self.module.training:  # setting it visits every module
            self.engine.train()
        self._reset_step_counters(observe)
        self.on_phase(FORWARD_PASS)
        self._objective.prepare(self, micro_batches)
        for batch, moved in self.feed(micro_batches):
            self._accumulate(batch, moved, scale, loss_sum)
            # The update is in the last call of `engine.step`: prepare the decision on it.
            if batch is micro_batches[-1]:
                self.on_phase(OPTIMIZER_UPDATE)
                self._norm = self._gradient_norm_before_step()
                self._scale_of_norm = scale_of_norm(self.engine.optimizer)
                policy = self._recording(skip_policy)
                self._skip_hook.watch(policy, self._local_contribution(loss_sum), num_targets)
            self.engine.step()
        return StepResult(loss_sum, num_targets, self._end_step())

    def refresh_parameters(self) -> None:
        """Make the parameters used in forward agree with the masters."""
        refresh_parameters(self.engine)
        self.exact.refresh(self.engine, self.module, self.mesh)

    def _reset_step_counters(self, observe: bool) -> None:
        """Begin a step; `observe`: whether the load of experts will be read."""
        optimizer = inner_optimizer(self.engine)
        if isinstance(optimizer, RuleOptimizer):
            optimizer.begin_count()
        self._router_losses.begin_step()
        counting = observe or self._bias.rate > 0  # the biases follow the counts of every step
        self.expert_load.begin_step(counting=counting, measuring=observe)

    def _recording(self, skip_policy: SkipPolicy | None) -> SkipPolicy | None:
        """Return `skip_policy`, which then also stores its decision in `_is_updated`."""
        self._is_updated = True
        if skip_policy is None:
            return None

        def decide(stats: StepStats) -> bool:
            self._is_updated = skip_policy(stats)
            return self._is_updated

        return decide

    def _end_step(self) -> StepStats | None:
        """Return the stats of the step; updates exact values, and the experts' biases if parameters
        were updated."""
        stats = self._skip_hook.close()
        self.exact.refresh(self.engine, self.module, self.mesh, trained_only=True)
        if self._bias.rate and self._is_updated and not has_overflowed(self.engine.optimizer):
            self._bias.update()
        return stats

    def _local_contribution(self, loss_sum: torch.Tensor) -> torch.Tensor:
        """Return this rank's term of a sum over all ranks that counts each loss once: `loss_sum`,
        or zero on the ranks with equal losses."""
        return loss_sum if self.reports_loss else torch.zeros_like(loss_sum)

    @property
    def reports_loss(self) -> bool:
        """True if this rank reports the loss of the samples; one rank per model copy does."""
        return self.mesh.coordinates.tensor_rank == 0 and self.counts_samples

    def _norm_before_update(self) -> Any:
        """Return the norm of the gradient when DeepSpeed has measured it, before the update."""
        if self._norm is not None:
            return self._norm
        return measured_norm(self.engine.optimizer) / self._scale_of_norm

    def _accumulate(
        self, batch: MicroBatch, moved: MicroBatch, scale: torch.Tensor, loss_sum: torch.Tensor
    ) -> None:
        """Forward and backward of a micro-batch; adds the loss to `loss_sum`. On return the outputs
        of the model are freed, before the update and the next micro-batch."""
        self.on_phase(FORWARD_PASS)
        summed, outputs = self._objective.summed_loss(self, batch, moved, scale)
        loss_sum += summed.detach()
        loss = summed * scale
        if self._multi_token is not None:
            loss = loss + self._multi_token.weighted(outputs.further) * scale
        router_loss = self._router_losses.of(outputs)
        if router_loss is not None:  # a mean over micro-batches, not a sum over targets
            loss = loss + router_loss / self.plan.accumulation
        self.on_phase(BACKWARD_PASS)
        with recording_if(False):  # the backward pass recomputes forward passes
            self.engine.backward(scaled_loss(loss, self.engine.optimizer), scale_wrt_gas=False)

    def _clip_gradients(self) -> None:
        # Same interface as the DeepSpeed method that this replaces.
        limit = self.engine.gradient_clipping()
        self._norm = clip_gradients(self.module.parameters(), limit, self.mesh)

    def _gradient_norm_before_step(self) -> torch.Tensor | None:
        """Return the norm of the complete gradient, if the update itself does not measure it."""
        # DeepSpeed's optimizers measure the norm, and so does `_clip_gradients`. The plain torch
        # optimizer (fp32, ZeRO 0) does not, and after step() the gradients are gone.
        is_torch_optimizer = isinstance(self.engine.optimizer, torch.optim.Optimizer)
        if not is_torch_optimizer:
            mark_gradients(self._sharded)
            return None
        if self.engine.gradient_clipping() > 0:
            return None
        return total_norm(self.module.parameters(), self.mesh)

    def gradient_norm(self) -> float:
        """Return the norm of the last full gradient before clipping. Waits for the device."""
        if self._norm is not None:
            return float(self._norm)
        norm = self.engine.get_global_grad_norm()
        return float(norm) / self._scale_of_norm if norm is not None else float("nan")

    def optimizer_sent_bytes(self) -> float | None:
        """Return the bytes that a rank sent to others in the update of the last step, the mean over
        all ranks; None with an optimizer that sends none."""
        optimizer = inner_optimizer(self.engine)
        sent_bytes = optimizer.sent_bytes() if isinstance(optimizer, RuleOptimizer) else None
        if sent_bytes is None:
            return None
        total = torch.tensor(float(sent_bytes), dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    def mtp_loss(self) -> float | None:
        """Return the mean loss of layers for multi-token prediction since the last call, in nats
        per target; None without any. Collective; waits for the device."""
        if self._multi_token is None:
            return None
        return self._multi_token.read(self.sum_over_replicas)

    def forget_mtp_loss(self) -> None:
        """Forget the losses that `mtp_loss` would return: the run has rolled back."""
        if self._multi_token is not None:
            self._multi_token.forget()

    def step_loss(self, result: StepResult) -> float:
        """Return the mean loss of a step over the global batch, in nats per token. Waits for the
        device."""
        if result.stats is not None:
            return result.stats.loss
        total = mean_loss(self._local_contribution(result.loss_sum), result.num_targets)
        dist.all_reduce(total)
        return float(total)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch]) -> Evaluation:
        """Evaluate all ranks' `batches`; losses are weighted as in training. Collective; every rank
        must bring equally many batches."""
        # Summed loss, sum of the units' weights, number of units.
        totals = torch.zeros(3, device=self.device, dtype=torch.float64)
        recorder = Recorder()
        self.engine.eval()
        with recorder.collecting():
            for batch, moved in self.feed(self._objective.prepare(self, batches)):
                loss, _ = self._objective.summed_loss(self, batch, moved)
                totals[0] += loss if self.counts_samples else 0
                totals[1] += self._count(batch)
                totals[2] += self._count(replace(batch, weights=None))
        self.engine.train()
        dist.all_reduce(totals, group=self.mesh.replicas)
        if self.mesh.topology.tensor_size > 1:
            # Tensor ranks may round differently, and must agree on early stopping.
            dist.broadcast(totals, src=0)
        # The host waits for the device here only, once for all batches.
        loss_sum, weight_sum, num_units = totals.tolist()
        return Evaluation(loss_sum / (weight_sum or 1), int(num_units), recorder.take())

    def close(self) -> None:
        """Remove DeepSpeed's hooks from the model."""
        self._skip_hook.remove()
        self.expert_load.counts.close()
        self.engine.destroy()
        if self.sequence is not None:
            self.sequence.close()

    @property
    def counts_samples(self) -> bool:
        """Whether this rank counts losses and units: of the ranks that share samples, one counts
        the samples; for the cross-entropy every rank counts its part of the tokens."""
        return self.sequence is None or self.computes_entropy or self.sequence.counts

    def _count(self, batch: MicroBatch) -> float:
        """Return the units of a micro-batch that this rank counts, or the sum of the units'
        weights."""
        if not self.counts_samples:
            return 0
        if batch.weights is not None:
            return float(self._part(batch.weights).double().sum())
        labels = self._part(batch.labels) if self.computes_entropy else batch.labels
        return self._objective.count(labels)

    def sum_over_replicas(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values` over the ranks with other samples."""
        dist.all_reduce(values, group=self.mesh.replicas)
        return values

    def _count_targets(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Return the number of targets in the global batch, or the sum of the targets' weights."""
        num_local = sum(self._count(batch) for batch in micro_batches)
        dtype = torch.int64 if micro_batches[0].weights is None else torch.float64
        # Filled on the device: a copy would wait for all its queued work.
        count = torch.full((), num_local, device=self.device, dtype=dtype)
        dist.all_reduce(count, group=self.mesh.replicas)
        return count


class RecentLosses:
    """Mean loss in nats per target token over the steps since it was last read or emptied. Sums
    stay on the device; a step costs two additions. Steps with a skipped update count only if all
    steps were skipped."""

    def __init__(self, engine: TrainEngine) -> None:
        self._engine = engine
        self.empty()

    def empty(self) -> None:
        """Forget the steps so far: the run has rolled back."""
        self._sum: StepResult | None = None
        self._skipped: StepResult | None = None

    def add(self, result: StepResult, *, updated: bool) -> None:
        """Count a step; `updated`: whether its update was made."""
        if not updated:
            self._skipped = result
        elif self._sum is None:
            self._sum = result  # unchanged: the mean over one step is the step's loss, bit for bit
        else:
            loss_sum = self._sum.loss_sum.double() + result.loss_sum.double()
            self._sum = StepResult(loss_sum, self._sum.num_targets + result.num_targets)

    def read(self) -> float:
        """Return the mean and empty the window. Collective; waits for the device."""
        result = self._sum or self._skipped
        assert result is not None
        self.empty()
        return self._engine.step_loss(result)
