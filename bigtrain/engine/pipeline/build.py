"""Construction of DeepSpeed's pipeline engine for a model split into stages."""

from __future__ import annotations

import io
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.topology import ProcessTopology
from torch import nn

from bigtrain.engine.deepspeed_patches.experts import (
    count_absent_gradients,
    engine_with_experts,
    mark_expert,
    name_of_experts,
    set_expert_groups,
)
from bigtrain.engine.deepspeed_patches.optimizers import undo_trial_update
from bigtrain.engine.deepspeed_patches.step import mark_replicated
from bigtrain.engine.forward import ModelOptions
from bigtrain.engine.optimizers.build import attach_optimizer, optimizer_maker, parameter_groups
from bigtrain.engine.optimizers.exact_parameters import ExactParameters
from bigtrain.engine.partitioning import (
    apply_layer_options,
    copy_of,
    run_dtype,
    sharded_partitioning,
    shards_parameters,
)
from bigtrain.engine.pipeline.engine import PipelineTrainEngine
from bigtrain.engine.pipeline.stage_module import StageModule, StagesModule
from bigtrain.engine.startup.mesh import Mesh
from bigtrain.engine.startup.printed_lines import prints_logged
from bigtrain.models.build import WHOLE, build_model
from bigtrain.models.equivalence.model_plan import ModelPlan
from bigtrain.models.parallel.sharding import Shard, shard_of, tag_shard
from bigtrain.models.parallel.stages import Stage
from bigtrain.models.weights.quantized import fill_with_zeros
from bigtrain.objectives.losses.next_token import NextTokenLoss, loss_terms
from bigtrain.objectives.losses.passes import make_objective
from bigtrain.settings.batch_plan import BatchPlan
from bigtrain.settings.deepspeed.engine_config import EngineConfig
from bigtrain.settings.run_config import RunConfig


def build_pipeline_engine(
    config: RunConfig,
    engine_config: EngineConfig,
    plan: BatchPlan,
    *,
    hf_config: Any,
    device: torch.device,
    mesh: Mesh,
    model_plan: ModelPlan,
) -> PipelineTrainEngine:
    """Build this rank's stage of the run's model. Collective over all ranks."""
    # This rank's layers, with all changes of modules, as DeepSpeed's pipeline module.
    stage = _build_stage(config, hf_config, mesh, model_plan)
    model_plan.isolation.install(stage.model)
    terms = loss_terms(config.objective)
    chunked_loss = model_plan.loss.install(stage.model, terms) if stage.is_last else None
    is_compiled = apply_layer_options(
        stage.model, config, engine_config, device, model_plan, chunked_loss=chunked_loss
    )
    objective = make_objective(config.objective)
    per_token = not isinstance(objective, NextTokenLoss)
    isolation = model_plan.isolation
    computes_loss = chunked_loss is not None
    module = StageModule(stage, device, isolation, computes_loss=computes_loss, per_token=per_token)
    exact = ExactParameters(stage.model, model_plan.parameters.float32_names, device)
    pipeline = _stages_module(module, mesh)
    # Parameter groups, equal on all stages.
    expert_size = mesh.topology.expert_size
    untrained = model_plan.parameters.untrained
    decay_groups = parameter_groups(
        stage.model, config.optimizer, expert_size, untrained, config.adapters
    )
    set_expert_groups(mesh.expert, mesh.expert_replicas)
    _fill_groups(pipeline, decay_groups, mesh, device)
    _mark_copies(stage)
    has_experts = any("moe" in group and group["params"] for group in decay_groups)
    patches = engine_with_experts() if has_experts else nullcontext()
    with prints_logged(), patches:
        engine, *_ = deepspeed.initialize(
            model=pipeline,
            optimizer=optimizer_maker(config.optimizer, stage.model, mesh, device),
            model_parameters=[group for group in decay_groups if group["params"]],
            config=copy_of(engine_config.deepspeed),
        )
    experts = name_of_experts(expert_size) if has_experts else None
    count_absent_gradients(engine.optimizer, experts)
    undo_trial_update(engine)
    attach_optimizer(engine, stage.model)
    fill_with_zeros(stage.model, device)  # the engine's constructor runs a forward pass
    return PipelineTrainEngine(
        engine,
        plan,
        device,
        mesh,
        ModelOptions(
            isolation=isolation,
            objective=objective,
            exact=exact,
            moe=config.moe,
            is_compiled=is_compiled,
            terms=terms,
            unreached=model_plan.parameters.unreached,
        ),
        stage=module,
        replicas=_replica_groups(stage, mesh),
    )


def _build_stage(config: RunConfig, hf_config: Any, mesh: Mesh, model_plan: ModelPlan) -> Stage:
    """Return this rank's layers of the run's model."""
    built: list[Stage] = []  # set while the model is built
    stages = model_plan.stages
    assert stages is not None
    partitioning = sharded_partitioning(mesh, None) if shards_parameters(mesh) else WHOLE

    def prepare(model: Any) -> None:
        if partitioning.prepare is not None:
            partitioning.prepare(model)
        index = mesh.coordinates.pipeline_rank
        built.append(Stage(model, stages.layout, stages.cuts, index))

    build_model(
        config.model,
        hf_config,
        seed=config.seed,
        partitioning=replace(partitioning, prepare=prepare),
        weights="left",  # read when the engine exists
        adapters=config.adapters,
        run_dtype=run_dtype(config),
        untrained=model_plan.parameters.untrained,
        float8=model_plan.float8,
    )
    (stage,) = built
    return stage


def _stages_module(module: StageModule, mesh: Mesh) -> StagesModule:
    """Return the module that DeepSpeed's pipeline engine treats as the full model."""
    topology = mesh.topology
    axes = {
        "data": topology.data_size,
        "pipe": topology.pipeline_size,
        "model": topology.tensor_size,
    }
    with redirect_stdout(io.StringIO()):
        return StagesModule(module, ProcessTopology(list(axes), list(axes.values())))


def _mark_copies(stage: Stage) -> None:
    """If several stages hold a parameter, let only the first count it in norms and checkpoints."""
    parameters: dict[str, Any] = dict(stage.model.named_parameters())
    for name, holders in stage.stages_by_shared_name.items():
        if stage.index in holders[1:]:
            parameter = parameters[name]
            shard = shard_of(parameter) or Shard(tuple(parameter.shape), primary=True)
            tag_shard(parameter, replace(shard, primary=False))
            mark_replicated(parameter, True)


def _fill_groups(
    pipeline: StagesModule, decay_groups: list[dict[str, Any]], mesh: Mesh, device: torch.device
) -> None:
    """Give every stage the parameter groups that any stage has: an empty group gets a parameter
    with a single zero, without a gradient. DeepSpeed would drop the group, and ZeRO 1 waits for the
    norm of each group on all stages (runtime/engine.py:2348, zero/stage_1_and_2.py:2943)."""
    is_present = torch.tensor(
        [len(group["params"]) > 0 for group in decay_groups], device=device
    ).int()
    dist.all_reduce(is_present, op=dist.ReduceOp.MAX, group=mesh.pipeline)
    for index, group in enumerate(decay_groups):
        if is_present[index] and not group["params"]:
            filler = nn.Parameter(torch.zeros(1, device=device))
            mark_replicated(filler, False)
            if "moe" in group:
                mark_expert(filler, group["name"])
            pipeline.register_parameter(f"filler_{index}", filler)
            group["params"] = [filler]


def _replica_groups(stage: Stage, mesh: Mesh) -> dict[str, dist.ProcessGroup]:
    """Return, for each parameter that several stages hold, the group of this rank over which its
    gradient is summed. Collective over all ranks."""
    pipelines = mesh.topology.groups("pipeline")
    groups_by_holders: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for holders in dict.fromkeys(stage.stages_by_shared_name.values()):
        holder_ranks = [[ranks[stage_index] for stage_index in holders] for ranks in pipelines]
        group, _ = dist.new_subgroups_by_enumeration(holder_ranks)
        groups_by_holders[holders] = group
    return {
        name: groups_by_holders[holders]
        for name, holders in stage.stages_by_shared_name.items()
        if stage.index in holders
    }
