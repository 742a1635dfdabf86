"""Pipeline parallelism: a Hugging Face model in stages, driven by DeepSpeed's 1F1B schedule.

DeepSpeed's engine (0.19.8, runtime/pipe/engine.py) gives the schedule, the exchange between stages
and the optimizer. What it gets wrong or leaves to the module is done here: the loss of a step, the
gradient norm of fp32 ZeRO 0, the gradients of parameters that several stages hold, parameter groups
that a stage has nothing for, parameters without a gradient.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.topology import ProcessTopology
from torch import nn

from bigtrain.config import RunConfig
from bigtrain.data.loader import IGNORED_LABEL, MicroBatch
from bigtrain.engine.build import StepResult, TrainEngine, summed_cross_entropy
from bigtrain.engine.construction import copy_of, parameter_groups
from bigtrain.engine.deepspeed_config import EngineConfig
from bigtrain.engine.fragments import undo_trial_update
from bigtrain.engine.layers import speed_up
from bigtrain.engine.mesh import Mesh
from bigtrain.engine.payload import Packing, touch
from bigtrain.engine.tensor import tensor_partitioning
from bigtrain.engine.update_gate import Judge
from bigtrain.models.choices import Choices
from bigtrain.models.huggingface import WHOLE, build_model
from bigtrain.models.isolation import Isolation
from bigtrain.models.router_logits import auxiliary_loss
from bigtrain.models.sharding import Shard, shard_of, tag_shard
from bigtrain.models.stages import Payload, Stage
from bigtrain.topology import BatchPlan

_TRIAL_TOKENS = 8


class _StageModule(nn.Module):
    """A stage as DeepSpeed calls it: token ids or the previous stage's tensors in, tensors out.

    The rest of a micro-batch (positions, and token ids where layers need them) comes from `feed`:
    every stage reads the same few kilobytes from the dataset instead of passing them on.

    computes_loss: whether the last stage's model does, instead of giving logits.
    """

    def __init__(
        self, stage: Stage, device: torch.device, isolation: Isolation, *, computes_loss: bool
    ) -> None:
        super().__init__()
        self.stage = stage
        self.isolation = isolation
        self.computes_loss = computes_loss
        self.incoming: Packing | None = None
        self.outgoing: Packing | None = None
        self._device = device
        self._batches: Iterator[MicroBatch] = iter(())
        self._factor: torch.Tensor | None = None

    def feed(self, batches: Iterable[MicroBatch], factor: torch.Tensor | None = None) -> None:
        """The micro-batches of the forward passes to come, in order; `factor` as for a
        `ChunkedLoss`."""
        self._batches, self._factor = iter(batches), factor

    def forward(self, received: torch.Tensor | tuple[torch.Tensor, ...]) -> Any:
        """On the last stage logits or the summed loss, and the router's auxiliary loss if there is
        one; else what to send."""
        batch = next(self._batches)
        if self.incoming is None:
            assert torch.is_tensor(received)
            payload, input_ids = None, received
        else:
            tensors = (received,) if torch.is_tensor(received) else received
            payload, input_ids = self.incoming.unpack(tensors), batch.input_ids
        loss = {}
        if self.computes_loss:
            loss["targets"] = batch.labels
            if self._factor is not None:
                loss["factor"] = self._factor
        outputs = self.run(payload, input_ids, batch.position_ids, **loss)
        sent = outputs if self.outgoing is None else self.outgoing.pack(outputs)
        if self.incoming is not None and self.incoming.num_differentiable > 1:
            others = tensors[1 : self.incoming.num_differentiable]
            sent = (touch(sent[0], others), *sent[1:])
        return sent if len(sent) > 1 else sent[0]

    def run(
        self,
        payload: Payload | None,
        input_ids: torch.Tensor,
        positions: torch.Tensor | None,
        **loss: torch.Tensor,
    ) -> Any:
        """A Payload, or the last stage's logits (with what a `ChunkedLoss` wants its summed loss)
        and auxiliary loss. `positions` are on the host."""
        if self.stage.needs_tokens:
            input_ids = input_ids.to(self._device, non_blocking=True).contiguous()
        moved = None if positions is None else positions.to(self._device, non_blocking=True)
        with self.isolation.told(positions):
            outputs = self.stage(payload, input_ids, moved, **loss)
        if not self.stage.is_last:
            return _with_gradient(outputs) if torch.is_grad_enabled() else outputs
        answer = outputs.loss if loss else outputs.logits
        auxiliary = auxiliary_loss(outputs)
        return (answer,) if auxiliary is None else (answer, auxiliary)


class _Module(PipelineModule):  # type: ignore[misc]
    """DeepSpeed's module with one "layer" per stage, of which this process has its own."""

    def __init__(self, stage: _StageModule, topology: ProcessTopology) -> None:
        num_stages = topology.get_dim("pipe")
        layers: list[nn.Module] = [nn.Identity() for _ in range(num_stages)]
        layers[stage.stage.index] = stage
        super().__init__(layers=layers, topology=topology, partition_method="uniform")


class PipelineTrainEngine(TrainEngine):
    """Trains one model in pipeline stages. Every method is collective over all processes."""

    def __init__(
        self,
        engine: Any,
        plan: BatchPlan,
        device: torch.device,
        mesh: Mesh,
        stage: _StageModule,
        replicas: dict[str, dist.ProcessGroup],
    ) -> None:
        self._stage = stage
        super().__init__(engine, plan, device, mesh, stage.isolation)
        self._replicas = replicas
        self._scale: torch.Tensor | float = 1.0
        self._loss_sum = torch.zeros((), device=device)
        self._num_targets = torch.zeros((), device=device)
        self._judge: Judge | None = None
        engine.module.loss_fn = self._loss
        engine._INSTRUCTION_MAP = {
            **engine._INSTRUCTION_MAP,
            schedule.ReduceTiedGrads: lambda _engine: self._sum_replicated_gradients(),
            schedule.OptimizerStep: self._optimizer_step,
        }
        self._learn_packings()

    @property
    def module(self) -> nn.Module:
        """This stage's part of the Hugging Face model, parameters under their own names."""
        model: nn.Module = self._stage.stage.model
        return model

    def train_step(
        self, micro_batches: Sequence[MicroBatch], lr: float, judge: Judge | None = None
    ) -> StepResult:
        """As `TrainEngine.train_step`; the micro-batches are in the pipeline together.

        All stages of a pipeline bring the same `micro_batches`.
        """
        assert len(micro_batches) == self.plan.accumulation
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        self.mark("counting target tokens")
        num_targets = self._count_targets(micro_batches)
        self.mark("forward and backward passes")
        # DeepSpeed divides by the data-parallel size, and by the accumulation.
        factor = self.plan.data_size * self.plan.accumulation
        self._scale = factor / num_targets.clamp(min=1)
        self._loss_sum = torch.zeros((), device=self.device, dtype=torch.float32)
        # Of which DeepSpeed takes the mean over micro-batches.
        self._stage.feed(micro_batches, self._scale / self.plan.accumulation)
        self._judge, self._num_targets = judge, num_targets
        self.engine.train_batch(data_iter=((b.input_ids, b.labels) for b in micro_batches))
        return StepResult(self._loss_sum, num_targets, self._gate.close())

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch]) -> tuple[float, int]:
        """As `TrainEngine.evaluate`; all stages of a pipeline bring the same batches."""
        held = list(batches)
        totals = torch.zeros(2, device=self.device, dtype=torch.float64)
        totals[1] = sum(int((b.labels != IGNORED_LABEL).sum()) for b in held)
        self._scale, self._loss_sum = 1.0, totals[0]
        self._stage.feed(held)
        # Its shapes are sent once; these may differ from those of training.
        self.engine.reset_activation_shape()
        self.engine.eval_batch(
            iter([(b.input_ids, b.labels) for b in held]),
            reduce_output=None,
            bcast_loss=False,
            num_micro_batches=len(held),
        )
        self.engine.reset_activation_shape()
        self.engine.train()
        if not self._speaks:
            totals.zero_()
        dist.all_reduce(totals)
        num_tokens = int(totals[1])
        return float(totals[0]) / max(1, num_tokens), num_tokens

    @torch.no_grad()
    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """As `TrainEngine.logits`; stages compute one after the other."""
        self.engine.eval()
        logits: torch.Tensor = self._in_turn(input_ids)[0][0]
        self.engine.train()
        return logits.float()

    def _in_turn(self, input_ids: torch.Tensor) -> tuple[Any, list[Packing]]:
        """What the last stage computes, on the CPU of every process, and the packings between."""
        ranks = dist.get_process_group_ranks(self.mesh.pipeline)
        handed: Any = None
        packings: list[Packing] = []
        for index, rank in enumerate(ranks):
            box: list[Any] = [None, None]
            if index == self._stage.stage.index:
                outputs = self._stage.run(handed, input_ids, None)
                if not self._stage.stage.is_last:
                    box[1] = Packing.of(outputs)
                box[0] = _moved(outputs, torch.device("cpu"))
            dist.broadcast_object_list(box, src=rank, group=self.mesh.pipeline, device=self.device)
            if index == len(ranks) - 1:
                return box[0], packings
            packings.append(box[1])
            handed = _moved(box[0], self.device)
        raise AssertionError

    def _learn_packings(self) -> None:
        """Try one small forward pass, so that every stage knows what it will be sent."""
        tokens = min(_TRIAL_TOKENS, self.plan.sequence_length)
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.enable_grad():
            _, packings = self._in_turn(torch.zeros((1, tokens), dtype=torch.int64))
        index = self._stage.stage.index
        self._stage.incoming = packings[index - 1] if index else None
        self._stage.outgoing = packings[index] if index < len(packings) else None

    def _loss(
        self, outputs: torch.Tensor | tuple[torch.Tensor, ...], labels: torch.Tensor
    ) -> torch.Tensor:
        answer, *auxiliary = (outputs,) if torch.is_tensor(outputs) else outputs
        computed = self._stage.computes_loss
        cross_entropy = answer if computed else summed_cross_entropy(answer, labels)
        self._loss_sum += cross_entropy.detach()
        loss = cross_entropy * self._scale
        # DeepSpeed makes it the mean over micro-batches.
        return loss + self._aux_coefficient * auxiliary[0] if auxiliary else loss

    @property
    def _speaks(self) -> bool:
        """Whether this process has the loss of its samples; one of each pipeline does."""
        return self._stage.stage.is_last and self.mesh.coordinates.tensor_rank == 0

    @torch.no_grad()
    def _sum_replicated_gradients(self) -> None:
        """Complete this process's gradients before they are reduced over replicas."""
        optimizer = self.engine.optimizer
        for parameter in self.engine.module.parameters():
            if parameter.requires_grad and _gradient(parameter, optimizer) is None:
                # One that is missing here and there on a replica would never be waited for.
                parameter.grad = torch.zeros_like(parameter)
        parameters = dict(self.module.named_parameters())
        for name, group in self._replicas.items():
            if parameters[name].requires_grad:
                dist.all_reduce(_gradient(parameters[name], optimizer), group=group)

    def _optimizer_step(self, engine: Any) -> None:
        self.mark("optimizer update")
        self._norm = self._gradient_norm_before_step()
        self._gate.watch(self._judge, self._own_share(self._loss_sum), self._num_targets)
        engine._exec_optimizer_step()


def _gradient(parameter: nn.Parameter, optimizer: Any) -> torch.Tensor | None:
    """Where DeepSpeed accumulates a parameter's gradient before it is reduced."""
    if hasattr(optimizer, "fp32_groups_gradient_dict"):  # BF16_Optimizer
        return parameter._hp_grad  # type: ignore[attr-defined, no-any-return]
    if getattr(optimizer, "use_grad_accum_attribute", False):
        return parameter.grad_accum  # type: ignore[attr-defined, no-any-return]
    return parameter.grad


def _with_gradient(payload: Payload) -> Payload:
    """`payload`, with a tensor that asks for a gradient: DeepSpeed sends one back in any case.

    Nothing does by itself where all parameters up to here are frozen.
    """
    asked = False

    def look(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal asked
        asked |= tensor.requires_grad
        return tensor

    def ask(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor

    payload.map(look)
    return payload if asked else replace(payload, outputs=payload.map(ask).outputs)


def _moved(outputs: Any, device: torch.device) -> Any:
    def move(tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.detach().to(device)
        return moved.requires_grad_(tensor.requires_grad)

    if isinstance(outputs, Payload):
        return outputs.map(move)
    return tuple(move(tensor) for tensor in outputs)


def build_pipeline_engine(
    config: RunConfig,
    engine_config: EngineConfig,
    plan: BatchPlan,
    hf_config: Any,
    device: torch.device,
    mesh: Mesh,
    choices: Choices,
) -> PipelineTrainEngine:
    """Build this process's stage of the run's model. Collective over all processes."""
    stage: Any = None
    stages = choices.stages
    assert stages is not None
    tensor = tensor_partitioning(mesh, None) if mesh.topology.tensor_size > 1 else WHOLE

    def prepare(model: Any) -> None:
        nonlocal stage
        if tensor.prepare is not None:
            tensor.prepare(model)
        index = mesh.coordinates.pipeline_rank
        stage = Stage(model, stages.layout, stages.cuts, index)

    partitioning = replace(tensor, prepare=prepare)
    build_model(
        config.model, hf_config, seed=config.seed, partitioning=partitioning, weights="left"
    )
    choices.isolation.install(stage.model)
    computes_loss = stage.is_last and choices.loss.install(stage.model) is not None
    speed_up(stage.model, config, engine_config, device)
    module = _StageModule(stage, device, choices.isolation, computes_loss=computes_loss)
    topology = mesh.topology
    axes = {
        "data": topology.data_size,
        "pipe": topology.pipeline_size,
        "model": topology.tensor_size,
    }
    with redirect_stdout(io.StringIO()):
        pipeline = _Module(module, ProcessTopology(list(axes), list(axes.values())))
    decay_groups = parameter_groups(stage.model, config.optimizer)
    _fill_groups(pipeline, decay_groups, mesh, device)
    _mark_copies(stage)
    with redirect_stdout(io.StringIO()):
        engine, *_ = deepspeed.initialize(
            model=pipeline,
            model_parameters=[group for group in decay_groups if group["params"]],
            config=copy_of(engine_config.deepspeed),
        )
    undo_trial_update(engine)
    return PipelineTrainEngine(engine, plan, device, mesh, module, _replica_groups(stage, mesh))


def _mark_copies(stage: Stage) -> None:
    """Of a parameter on several stages, let the first answer for it, in norms and checkpoints."""
    parameters: dict[str, Any] = dict(stage.model.named_parameters())
    for name, holders in stage.replicas.items():
        if stage.index in holders[1:]:
            parameter = parameters[name]
            shard = shard_of(parameter) or Shard(tuple(parameter.shape), primary=True)
            tag_shard(parameter, replace(shard, primary=False))
            parameter.ds_pipe_replicated = True


def _fill_groups(
    pipeline: _Module, decay_groups: list[dict[str, Any]], mesh: Mesh, device: torch.device
) -> None:
    """Give every stage the parameter groups that any stage has.

    DeepSpeed drops empty ones, and ZeRO 1 then waits for a norm per group that some stages do not
    have (runtime/engine.py:2348, zero/stage_1_and_2.py:2943): a lone zero without a gradient fills.
    """
    present = torch.tensor(
        [len(group["params"]) > 0 for group in decay_groups], device=device
    ).int()
    dist.all_reduce(present, op=dist.ReduceOp.MAX, group=mesh.pipeline)
    for index, group in enumerate(decay_groups):
        if present[index] and not group["params"]:
            filler = nn.Parameter(torch.zeros(1, device=device))
            filler.ds_pipe_replicated = False  # type: ignore[attr-defined]
            pipeline.register_parameter(f"filler_{group['name']}", filler)
            group["params"] = [filler]


def _replica_groups(stage: Stage, mesh: Mesh) -> dict[str, dist.ProcessGroup]:
    """For each parameter that this and other stages hold, the group of processes to sum over."""
    pipelines = mesh.topology.groups("pipeline")
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for holders in dict.fromkeys(stage.replicas.values()):
        group, _ = dist.new_subgroups_by_enumeration(
            [[ranks[index] for index in holders] for ranks in pipelines]
        )
        made[holders] = group
    return {
        name: made[holders] for name, holders in stage.replicas.items() if stage.index in holders
    }
