"""DeepSpeed engine of a Hugging Face model, and the optimizer step as bigtrain defines it.

The loss of a step is the mean over all target tokens of the *global* batch: gradients do not depend
on how the batch is split into micro-batches and over ranks, even if labels are masked unevenly.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
import torch.distributed as dist

from bigtrain.engine.deepspeed_patches.experts import (
    count_absent_gradients,
    engine_with_experts,
    fix_allgather_order,
    set_expert_groups,
)
from bigtrain.engine.deepspeed_patches.host_time import HostTime, time_reductions
from bigtrain.engine.deepspeed_patches.optimizers import undo_trial_update
from bigtrain.engine.deepspeed_patches.startup import set_mpu
from bigtrain.engine.deepspeed_patches.step import skip_redundant_work
from bigtrain.engine.forward import ModelOptions
from bigtrain.engine.optimizers.build import attach_optimizer, optimizer_maker, parameter_groups
from bigtrain.engine.optimizers.exact_parameters import ExactParameters
from bigtrain.engine.partitioning import (
    apply_layer_options,
    build_dtype,
    copy_of,
    move_buffers,
    partitioning_of,
    register_external_parameters,
    run_dtype,
)
from bigtrain.engine.startup.mesh import Mesh, ModelParallelUnit
from bigtrain.engine.startup.printed_lines import prints_logged
from bigtrain.engine.train_engine import TrainEngine
from bigtrain.models.build import build_model
from bigtrain.models.equivalence.model_plan import ModelPlan, require_model_plan
from bigtrain.models.layers.compilation import compiled_layers
from bigtrain.models.layers.multi_token import mtp_layers
from bigtrain.objectives.losses.next_token import loss_terms
from bigtrain.objectives.losses.passes import make_objective
from bigtrain.settings.batch_plan import BatchPlan
from bigtrain.settings.deepspeed.engine_config import EngineConfig
from bigtrain.settings.run_config import RunConfig

if TYPE_CHECKING:
    from bigtrain.models.parallel.sequence import SequenceParallel


def build_engine(
    config: RunConfig,
    engine_config: EngineConfig,
    plan: BatchPlan,
    hf_config: Any,
    device: torch.device,
    mesh: Mesh,
    model_plan: ModelPlan | None = None,
) -> TrainEngine:
    """Build the run's model and hand it to DeepSpeed. Collective over all ranks.

    `model_plan`: the result of `inspect_inputs`; made here if not given. Pretrained weights are
    uninitialized until the caller reads or restores them. Raises ModelError for a tensor-parallel
    plan that cannot be carried out."""
    model_plan = model_plan or require_model_plan(config, hf_config, plan)
    if model_plan.stages is not None:
        from bigtrain.engine.pipeline.build import build_pipeline_engine

        return build_pipeline_engine(
            config,
            engine_config,
            plan,
            hf_config=hf_config,
            device=device,
            mesh=mesh,
            model_plan=model_plan,
        )
    model = build_model(
        config.model,
        hf_config,
        seed=config.seed,
        dtype=build_dtype(config, engine_config),
        partitioning=partitioning_of(engine_config, mesh),
        weights="left",
        adapters=config.adapters,
        run_dtype=run_dtype(config),
        untrained=model_plan.parameters.untrained,
        float8=model_plan.float8,
    )
    # Everything that changes the model's modules comes before DeepSpeed wraps it.
    model_plan.isolation.install(model)
    sequence = _divide_sequences(model, mesh) if mesh.topology.sequence_size > 1 else None
    chunked_loss = model_plan.loss.install(model, loss_terms(config.objective))
    multi_token = None
    if (layers := mtp_layers(model)) is not None:
        from bigtrain.engine.multi_token import MultiTokenLoss

        multi_token = MultiTokenLoss(model, layers, config.objective.mtp_weight, device)
    exact = ExactParameters(model, model_plan.parameters.float32_names, device)
    is_compiled = apply_layer_options(
        model, config, engine_config, device, model_plan, chunked_loss=chunked_loss
    )
    untrained, expert_size = model_plan.parameters.untrained, mesh.topology.expert_size
    groups = parameter_groups(model, config.optimizer, expert_size, untrained, config.adapters)
    engine = _initialize(model, groups, config, engine_config, device=device, mesh=mesh)
    # Patches of the engine that save host time, and measure it.
    host_time = HostTime()
    skip_redundant_work(engine, mesh.replicas, host_time, compiled_layers(model))
    time_reductions(engine, host_time)
    return TrainEngine(
        engine,
        plan,
        device,
        mesh,
        ModelOptions(
            isolation=model_plan.isolation,
            objective=make_objective(config.objective),
            exact=exact,
            moe=config.moe,
            sequence=sequence,
            computes_loss=chunked_loss is not None,
            is_compiled=is_compiled,
            terms=loss_terms(config.objective),
            multi_token=multi_token,
            unreached=model_plan.parameters.unreached,
        ),
        host_time=host_time,
    )


def _divide_sequences(model: Any, mesh: Mesh) -> SequenceParallel:
    """Divide the sequences of `model` over the ranks of `mesh` that share samples."""
    from bigtrain.models.parallel.sequence import SequenceParallel
    from bigtrain.models.parallel.sequence_exchange import GroupExchange, SequenceExchange

    exchanges = map(GroupExchange, (mesh.sequence, mesh.ulysses, mesh.ring))
    return SequenceParallel(model, SequenceExchange(*exchanges))


def _initialize(
    model: Any,
    groups: list[dict[str, Any]],
    config: RunConfig,
    engine_config: EngineConfig,
    *,
    device: torch.device,
    mesh: Mesh,
) -> Any:
    """Return DeepSpeed's engine over `model`, with its optimizer. Collective over all ranks."""
    mpu = ModelParallelUnit(mesh) if dist.get_world_size(mesh.model) > 1 else None
    set_mpu(mpu)
    set_expert_groups(mesh.expert, mesh.expert_replicas)
    has_experts = any("moe" in group and group["params"] for group in groups)
    move_buffers(model, device)  # with ZeRO 3, DeepSpeed does not move them
    patches = engine_with_experts() if has_experts else nullcontext()
    if engine_config.zero_stage == 3:
        from bigtrain.models.layers.recurrence.restarts import call_equally_often

        call_equally_often(model)
    with prints_logged(), patches:
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer_maker(config.optimizer, model, mesh, device),
            model_parameters=[group for group in groups if group["params"]],
            config=copy_of(engine_config.deepspeed),
            mpu=mpu,
        )
    # Corrections of DeepSpeed that need its engine.
    if engine_config.zero_stage == 3:
        register_external_parameters(model)
    if mesh.topology.expert_size > 1:
        fix_allgather_order(engine.optimizer)
    count_absent_gradients(engine.optimizer)
    undo_trial_update(engine)
    attach_optimizer(engine, model)
    return engine
