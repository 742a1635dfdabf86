"""Pipeline parallelism: a Hugging Face model in stages, driven by DeepSpeed's 1F1B schedule
(0.19.8, runtime/pipe/engine.py). This module adds the loss of a step, the gradient norm of fp32
ZeRO 0, the sum of the gradients of parameters in several stages, and zeros for parameters without a
gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.engine.deepspeed_patches.host_time import time_reductions
from bigtrain.engine.deepspeed_patches.pipeline import (
    accumulated_gradient,
    fill_gradient,
    forget_batch_times,
    replace_instructions,
    replace_loss,
    run_optimizer_step,
)
from bigtrain.engine.forward import ModelOptions
from bigtrain.engine.optimizers.build import set_learning_rate
from bigtrain.engine.optimizers.skip_step import SkipPolicy, divisor
from bigtrain.engine.pipeline.stage_module import P2PLayout, StageModule
from bigtrain.engine.startup.mesh import Mesh
from bigtrain.engine.train_engine import (
    BOTH_PASSES,
    COUNTING_TARGETS,
    OPTIMIZER_UPDATE,
    Evaluation,
    StepResult,
    TrainEngine,
)
from bigtrain.errors import ModelError
from bigtrain.metrics.recording import Recorder
from bigtrain.models.layers.parameters import has_score_head
from bigtrain.models.layers.token_loss import (
    TopTokens,
    summed_token_loss,
    token_log_probabilities,
    token_scores,
)
from bigtrain.models.parallel.stages import Payload
from bigtrain.settings.batch_plan import BatchPlan


class PipelineTrainEngine(TrainEngine):
    """Engine that trains one model in pipeline stages. Every method is collective over all
    ranks."""

    def __init__(
        self,
        engine: Any,
        plan: BatchPlan,
        device: torch.device,
        mesh: Mesh,
        options: ModelOptions,
        *,
        stage: StageModule,
        replicas: dict[str, dist.ProcessGroup],
    ) -> None:
        self._stage = stage  # before `super()`, which reads `module`
        super().__init__(engine, plan, device, mesh, options)
        time_reductions(engine, self.host_time)
        self._replicas = replicas
        self._scale: torch.Tensor | float = 1.0
        self._loss_sum = torch.zeros((), device=device)
        self._num_targets = torch.zeros((), device=device)
        self._skip_policy: SkipPolicy | None = None
        self._scores_samples = has_score_head(self.module)
        # Micro-batches whose loss the last stage computes next, and, in `row_sums`, its results.
        self._samples: Iterator[MicroBatch] = iter(())
        self._sums: list[torch.Tensor] | None = None
        replace_loss(engine, self._last_stage_loss)
        replace_instructions(
            engine,
            reduce_tied_gradients=lambda _engine: self._sum_replicated_gradients(),
            optimizer_step=self._optimizer_step,
        )
        # One forward pass, with gradients, determines which tensors a stage receives, and which
        # tensors need gradients. The sample has the run's sequence length, since layers may pass on
        # more tensors for long samples.
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.enable_grad():
            ids = torch.zeros((1, self.plan.sequence_length), dtype=torch.int64)
            _, layouts = self._run_stages(ids)  # layouts[i]: from stage i to stage i + 1
        index = self._stage.stage.index
        self._stage.incoming = layouts[index - 1] if index > 0 else None
        self._stage.outgoing = layouts[index] if index < len(layouts) else None

    @property
    def module(self) -> nn.Module:
        """This stage's part of the Hugging Face model, with the names of its parameters."""
        model: nn.Module = self._stage.stage.model
        return model

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        lr: float,
        skip_policy: SkipPolicy | None = None,
        *,
        observe: bool = False,
    ) -> StepResult:
        """Train one step like `TrainEngine.train_step`, with all micro-batches in the pipeline. All
        stages of a pipeline pass equal `micro_batches`."""
        assert len(micro_batches) == self.plan.accumulation
        set_learning_rate(self.engine.optimizer, lr)
        self.on_phase(COUNTING_TARGETS)
        num_targets = self._count_targets(micro_batches)
        self.on_phase(BOTH_PASSES)
        self._objective.prepare(self, micro_batches)
        # loss = sum over targets / number of targets. DeepSpeed divides by the data-parallel size
        # and the accumulation, as is right for the router loss, a mean over micro-batches.
        deepspeed_divisor = self.plan.data_size * self.plan.accumulation
        self._scale = (deepspeed_divisor / divisor(num_targets)).float()
        self._loss_sum = torch.zeros((), device=self.device, dtype=torch.float32)
        loss_factor = self._scale / self.plan.accumulation
        data = self._feed(micro_batches, loss_factor, self._router_losses.of)
        self._skip_policy, self._num_targets = self._recording(skip_policy), num_targets
        self._reset_step_counters(observe)
        self.engine.train_batch(data_iter=data)
        forget_batch_times(self.engine)
        return StepResult(self._loss_sum, num_targets, self._end_step())

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch]) -> Evaluation:
        """Evaluate like `TrainEngine.evaluate`; all stages of a pipeline pass equal batches."""
        recorder = Recorder()
        # Summed loss, to which the last stage adds, sum of the units' weights, number of units.
        totals = torch.zeros(3, device=self.device, dtype=torch.float64)
        self._scale, self._loss_sum = 1.0, totals[0]
        with recorder.collecting():
            all_batches = list(self._objective.prepare(self, batches))
            self._run_forward(self._feed(all_batches), len(all_batches))
        totals[1] = sum(map(self._count, all_batches))
        totals[2] = sum(self._count(replace(batch, weights=None)) for batch in all_batches)
        if not self.reports_loss:
            totals.zero_()
        dist.all_reduce(totals)
        # The host waits for the device here only, once for all batches.
        loss_sum, weight_sum, num_units = totals.tolist()
        return Evaluation(loss_sum / (weight_sum or 1), int(num_units), recorder.take())

    def _feed(
        self,
        batches: Sequence[MicroBatch],
        factor: torch.Tensor | None = None,
        added: Callable[[Any], torch.Tensor | None] | None = None,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Set the micro-batches of the next forward passes; yield the tensors that DeepSpeed loads,
        on the device, since copies by DeepSpeed would wait for the device. The stages compute the
        rows of a micro-batch that the objective trains. factor, added: as for
        `StageModule.feed`."""
        stage_batches = [self._objective.trained(batch) for batch in batches]
        if self._scores_samples:
            stage_batches = [self._padded(batch) for batch in stage_batches]
        self._samples = iter(batches)
        self._stage.feed(stage_batches, factor, added)
        return self._loaded(stage_batches)

    def _loaded(self, batches: Sequence[MicroBatch]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the ids and labels of each batch on the device."""
        for batch in batches:
            yield self._to_device(batch.input_ids), self._to_device(batch.labels)

    def _run_forward(
        self, data: Iterator[tuple[torch.Tensor, torch.Tensor]], num_batches: int
    ) -> None:
        """Run the forward passes that have been fed, in evaluation mode."""
        # DeepSpeed sends shapes once; the shapes of evaluation may differ from training.
        self.engine.reset_activation_shape()
        self.engine.eval_batch(
            data, reduce_output=None, bcast_loss=False, num_micro_batches=num_batches
        )
        self.engine.reset_activation_shape()
        self.engine.train()

    @torch.no_grad()
    def row_sums(
        self, batches: Iterable[MicroBatch]
    ) -> Iterator[tuple[MicroBatch, MicroBatch, torch.Tensor]]:
        """Yield rows like `TrainEngine.row_sums`, on the last stage only."""
        all_batches = list(batches)
        self._sums = []
        self._stage.feed(all_batches)
        self._run_forward(self._loaded(all_batches), len(all_batches))
        sums, self._sums = self._sums, None
        for batch, batch_sums in zip(all_batches, sums, strict=False):
            yield batch, batch.moved(self._to_device), batch_sums

    def sum_over_replicas(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values` over the ranks that report a loss, on every rank."""
        total = self._local_contribution(values.to(self.device))
        dist.all_reduce(total)
        return total

    @torch.no_grad()
    def read_logits(
        self, input_ids: torch.Tensor, read: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Read logits like `TrainEngine.read_logits`; stages compute in turn."""
        self.engine.eval()
        outputs, _ = self._run_stages(input_ids, read)
        self.engine.train()
        result: torch.Tensor = outputs[0]
        return result

    @torch.no_grad()
    def token_scores(self, batch: MicroBatch, top: TopTokens | None = None) -> torch.Tensor:
        """Return scores like `TrainEngine.token_scores`; stages compute in turn."""
        labels = batch.labels.to(self.device)

        def read(logits: torch.Tensor) -> torch.Tensor:
            scores = token_scores(logits.flatten(0, 1).float(), labels.flatten(), top)
            return scores.view(*labels.shape, -1)

        self.engine.eval()
        outputs, _ = self._run_stages(batch.input_ids, read)
        self.engine.train()
        scores: torch.Tensor = outputs[0]
        return scores

    def _run_stages(
        self,
        input_ids: torch.Tensor,
        read: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
    ) -> tuple[Any, list[P2PLayout]]:
        """Run the stages one after another; return the last stage's outputs on the CPU of every
        rank, with the result of `read` instead of the logits, and the layouts between stages."""
        ranks = dist.get_process_group_ranks(self.mesh.pipeline)
        inputs: Any = None
        layouts: list[P2PLayout] = []
        for index, rank in enumerate(ranks):
            outputs: Any = None
            layout: Any = None
            if index == self._stage.stage.index:
                outputs = self._stage.run(inputs, input_ids, None)
                if self._stage.stage.is_last:
                    outputs = (read(outputs[0]),)
                else:
                    layout = P2PLayout.of(outputs)
                outputs = _moved(outputs, torch.device("cpu"))
            sent = [outputs, layout]
            dist.broadcast_object_list(sent, src=rank, group=self.mesh.pipeline, device=self.device)
            outputs, layout = sent
            if index == len(ranks) - 1:
                return outputs, layouts
            layouts.append(layout)
            inputs = _moved(outputs, self.device)
        raise AssertionError

    def _last_stage_loss(
        self, outputs: torch.Tensor | tuple[torch.Tensor, ...], labels: torch.Tensor
    ) -> torch.Tensor:
        """Return the loss of a micro-batch from the last stage's outputs; add the unscaled loss to
        `_loss_sum`. outputs: logits, losses, log-probabilities or scores, and the router loss if
        there is one."""
        values, *router_losses = (outputs,) if torch.is_tensor(outputs) else outputs
        if not (self.computes_entropy or self._stage.computes_loss or self._scores_samples):
            values = token_log_probabilities(values, labels)
        if self._sums is not None:  # `row_sums` needs no loss
            self._sums.append(values.sum(-1))
            return values.new_zeros(())
        batch = next(self._samples)
        if not self.computes_entropy:
            moved = batch.moved(self._to_device)
            passes = _LastStage(values, self.reports_loss)
            summed, _ = self._objective.summed_loss(passes, batch, moved)
        elif self._stage.computes_loss:
            summed = values
        else:
            teacher = self._stage.teacher(batch)
            if teacher is not None:
                teacher = teacher[0].flatten(0, 1), teacher[1].flatten(0, 1)
            logits, weights = values.flatten(0, 1).float(), self._stage.weights(batch)
            weights = None if weights is None else weights.flatten()
            summed = summed_token_loss(logits, labels.flatten(), self._terms, teacher, weights)
        self._loss_sum += summed.detach()
        loss = summed * self._scale
        # DeepSpeed takes the mean of the losses over micro-batches.
        return loss + router_losses[0] if router_losses else loss

    @property
    def reports_loss(self) -> bool:
        """True if this rank has the loss of the samples; one rank per pipeline does."""
        return self._stage.stage.is_last and self.mesh.coordinates.tensor_rank == 0

    @torch.no_grad()
    def _sum_replicated_gradients(self) -> None:
        """Sum the gradients of parameters in several stages, before gradients are reduced over
        replicas; missing gradients become zeros."""
        optimizer = self.engine.optimizer
        for parameter in self.engine.module.parameters():
            if parameter.requires_grad and accumulated_gradient(parameter, optimizer) is None:
                # The reduction would hang if another replica has this gradient.
                fill_gradient(parameter, optimizer)
        parameters = dict(self.module.named_parameters())
        for name, group in self._replicas.items():
            if parameters[name].requires_grad:
                dist.all_reduce(accumulated_gradient(parameters[name], optimizer), group=group)

    def _optimizer_step(self, engine: Any) -> None:
        self.on_phase(OPTIMIZER_UPDATE)
        self._norm = self._gradient_norm_before_step()
        self._skip_hook.watch(
            self._skip_policy, self._local_contribution(self._loss_sum), self._num_targets
        )
        run_optimizer_step(engine)


class _LastStage:
    """Forward passes for an objective (`bigtrain.objectives.losses.passes`) of a micro-batch that
    the stages have computed. values: log-probabilities of the targets, or scores of the rows. A
    reference model is not computed: its scores must be stored."""

    def __init__(self, values: torch.Tensor, reports_loss: bool) -> None:
        self._values, self.reports_loss = values, reports_loss

    def log_probabilities(self, *_: MicroBatch) -> tuple[torch.Tensor, Any]:
        return self._values, None

    def scores(self, *_: MicroBatch) -> tuple[torch.Tensor, Any]:
        return self._values.float(), None

    def __getattr__(self, name: str) -> Any:
        raise ModelError(f"an objective in pipeline stages has no {name}")


def _moved(outputs: Any, device: torch.device) -> Any:
    """Return detached copies of outputs on `device`, which require gradients as the outputs do."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.detach().to(device)
        return moved.requires_grad_(tensor.requires_grad)

    if isinstance(outputs, Payload):
        return outputs.map(move)
    return tuple(move(tensor) for tensor in outputs)
