"""Pipeline parallelism: a Hugging Face model in stages, driven by DeepSpeed's 1F1B schedule
(0.19.8, runtime/pipe/engine.py). Done here: the loss of a step, the gradient norm of fp32 ZeRO 0,
gradients of parameters of several stages, empty parameter groups, parameters without a gradient."""

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
    """Trains one model in pipeline stages. Every method is collective over all ranks."""

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
        self._samples: Iterator[MicroBatch] = iter(())
        self._sums: list[torch.Tensor] | None = None
        replace_loss(engine, self._last_stage_loss)
        replace_instructions(
            engine,
            reduce_tied_gradients=lambda _engine: self._sum_replicated_gradients(),
            optimizer_step=self._optimizer_step,
        )
        # Run one forward pass, with gradients, so that every stage knows the layout of what it
        # receives, and which tensors need gradients. The sample has the run's sequence length: in
        # long samples, layers may hand over more tensors.
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.enable_grad():
            ids = torch.zeros((1, self.plan.sequence_length), dtype=torch.int64)
            _, layouts = self._in_turn(ids)  # layouts[i]: from stage i to stage i + 1
        index = self._stage.stage.index
        self._stage.incoming = layouts[index - 1] if index else None
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
        # DeepSpeed divides by the data-parallel size, and by the accumulation.
        factor = self.plan.data_size * self.plan.accumulation
        self._scale = (factor / divisor(num_targets)).float()
        self._loss_sum = torch.zeros((), device=self.device, dtype=torch.float32)
        # DeepSpeed takes the mean of the router loss over micro-batches.
        factor_of_loss = self._scale / self.plan.accumulation
        data = self._feed(micro_batches, factor_of_loss, self._router_losses.of)
        self._skip_policy, self._num_targets = self._recording(skip_policy), num_targets
        self._reset_step_counters(observe)
        self.engine.train_batch(data_iter=data)
        forget_batch_times(self.engine)
        return StepResult(self._loss_sum, num_targets, self._end_step())

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch]) -> Evaluation:
        """Evaluate like `TrainEngine.evaluate`; all stages of a pipeline pass equal batches."""
        recorder = Recorder()
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
        loss_sum, weight, num_units = totals.tolist()
        return Evaluation(loss_sum / (weight or 1), int(num_units), recorder.take())

    def _feed(
        self,
        batches: Sequence[MicroBatch],
        factor: torch.Tensor | None = None,
        added: Callable[[Any], torch.Tensor | None] | None = None,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Set the micro-batches of the next forward passes, and return the tensors that DeepSpeed
        loads, on the device: copies by DeepSpeed would wait for the device. The stages compute the
        rows of a micro-batch that the objective trains."""
        stage_batches = [self._objective.trained(batch) for batch in batches]
        if self._scores_samples:
            stage_batches = [self._padded(batch) for batch in stage_batches]
        self._samples = iter(batches)
        self._stage.feed(stage_batches, factor, added)
        return self._loaded(stage_batches)

    def _loaded(self, batches: Sequence[MicroBatch]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for batch in batches:
            yield self._to_device(batch.input_ids), self._to_device(batch.labels)

    def _run_forward(
        self, data: Iterator[tuple[torch.Tensor, torch.Tensor]], num_batches: int
    ) -> None:
        """Run the forward passes that have been fed, in evaluation mode."""
        # DeepSpeed sends shapes once; evaluation may have other shapes than training.
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
        """Return the sum of `values` over the last stages' ranks with other samples, on every
        rank."""
        total = self._local_contribution(values.to(self.device))
        dist.all_reduce(total)
        return total

    @torch.no_grad()
    def read_logits(
        self, input_ids: torch.Tensor, read: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Read logits like `TrainEngine.read_logits`; stages compute in turn."""
        self.engine.eval()
        result: torch.Tensor = self._in_turn(input_ids, read)[0][0]
        self.engine.train()
        return result

    @torch.no_grad()
    def token_scores(self, batch: MicroBatch, top: TopTokens | None = None) -> torch.Tensor:
        """Return scores like `TrainEngine.token_scores`; stages compute in turn."""
        labels = batch.labels.to(self.device)

        def read(logits: torch.Tensor) -> torch.Tensor:
            scores = token_scores(logits.flatten(0, 1).float(), labels.flatten(), top)
            return scores.view(*labels.shape, -1)

        self.engine.eval()
        result: torch.Tensor = self._in_turn(batch.input_ids, read)[0][0]
        self.engine.train()
        return result

    def _in_turn(
        self,
        input_ids: torch.Tensor,
        read: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
    ) -> tuple[Any, list[P2PLayout]]:
        """Run the stages in turn; returns the last stage's outputs on the CPU of every rank, with
        the result of `read` instead of the logits, and the layouts between stages."""
        ranks = dist.get_process_group_ranks(self.mesh.pipeline)
        handed: Any = None
        layouts: list[P2PLayout] = []
        for index, rank in enumerate(ranks):
            box: list[Any] = [None, None]
            if index == self._stage.stage.index:
                outputs = self._stage.run(handed, input_ids, None)
                if self._stage.stage.is_last:
                    outputs = (read(outputs[0]),)
                else:
                    box[1] = P2PLayout.of(outputs)
                box[0] = _moved(outputs, torch.device("cpu"))
            dist.broadcast_object_list(box, src=rank, group=self.mesh.pipeline, device=self.device)
            if index == len(ranks) - 1:
                return box[0], layouts
            layouts.append(box[1])
            handed = _moved(box[0], self.device)
        raise AssertionError

    def _last_stage_loss(
        self, outputs: torch.Tensor | tuple[torch.Tensor, ...], labels: torch.Tensor
    ) -> torch.Tensor:
        answer, *added = (outputs,) if torch.is_tensor(outputs) else outputs
        if not (self.computes_entropy or self._stage.computes_loss or self._scores_samples):
            answer = token_log_probabilities(answer, labels)
        if self._sums is not None:
            self._sums.append(answer.sum(-1))
            return answer.new_zeros(())
        batch = next(self._samples)
        if not self.computes_entropy:
            moved = batch.moved(self._to_device)
            summed = self._objective.summed_loss(
                _LastStage(answer, self.reports_loss), batch, moved
            )[0]
        elif self._stage.computes_loss:
            summed = answer
        else:
            teacher = self._stage.teacher(batch)
            if teacher is not None:
                teacher = teacher[0].flatten(0, 1), teacher[1].flatten(0, 1)
            logits, weights = answer.flatten(0, 1).float(), self._stage.weights(batch)
            weights = None if weights is None else weights.flatten()
            summed = summed_token_loss(logits, labels.flatten(), self._terms, teacher, weights)
        self._loss_sum += summed.detach()
        loss = summed * self._scale
        # DeepSpeed makes it the mean over micro-batches.
        return loss + added[0] if added else loss

    @property
    def reports_loss(self) -> bool:
        """True if this rank has the loss of the samples; one rank per pipeline does."""
        return self._stage.stage.is_last and self.mesh.coordinates.tensor_rank == 0

    @torch.no_grad()
    def _sum_replicated_gradients(self) -> None:
        """Complete this rank's gradients before they are reduced over replicas."""
        optimizer = self.engine.optimizer
        for parameter in self.engine.module.parameters():
            if parameter.requires_grad and accumulated_gradient(parameter, optimizer) is None:
                # A gradient that is missing here and present on another replica would make the
                # reduction hang.
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
    """Passes (`bigtrain.objectives.losses.passes`) of a micro-batch that has reached the last
    stage. values: log-probabilities of the targets, or scores of the rows. Scores of a reference
    are only the stored scores."""

    def __init__(self, values: torch.Tensor, reports_loss: bool) -> None:
        self._values, self.reports_loss = values, reports_loss

    def log_probabilities(self, *_: MicroBatch) -> tuple[torch.Tensor, Any]:
        return self._values, None

    def scores(self, *_: MicroBatch) -> tuple[torch.Tensor, Any]:
        return self._values.float(), None

    def __getattr__(self, name: str) -> Any:
        raise ModelError(f"an objective in pipeline stages has no {name}")


def _moved(outputs: Any, device: torch.device) -> Any:
    def move(tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.detach().to(device)
        return moved.requires_grad_(tensor.requires_grad)

    if isinstance(outputs, Payload):
        return outputs.map(move)
    return tuple(move(tensor) for tensor in outputs)
