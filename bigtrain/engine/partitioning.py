"""Sharding and partitioning of parameters, and options of layers, while a model is built for
`deepspeed.initialize`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from bigtrain.engine.deepspeed_patches.experts import (
    mark_expert,
    name_of_experts,
    set_expert_groups,
)
from bigtrain.engine.deepspeed_patches.partitions import PartitioningInit, partition_parameters
from bigtrain.engine.startup.mesh import Mesh, ModelParallelUnit
from bigtrain.models.build import WHOLE, Partitioning
from bigtrain.models.equivalence.model_plan import ModelPlan
from bigtrain.models.layers.adapter_names import borrowed_parameters, has_adapters
from bigtrain.models.layers.compilation import compile_layers
from bigtrain.models.layers.kernels import apply_kernels, fast_path_of
from bigtrain.models.parallel.sharding import cut_parameter, is_expert
from bigtrain.models.transformers_patches import modules_of_experts, trace_dora
from bigtrain.settings.compatibility.facts import read_facts
from bigtrain.settings.deepspeed.engine_config import EngineConfig
from bigtrain.settings.run_config import RunConfig

if TYPE_CHECKING:
    from bigtrain.models.layers.chunked_loss import ChunkedLoss


def build_dtype(config: RunConfig, engine_config: EngineConfig) -> torch.dtype:
    """Return the dtype in which parameters are constructed."""
    # ZeRO-3 partitions parameters as they are built, so they are built in their final dtype. Lower
    # stages cast the full model in `initialize` and make the fp32 masters from the cast model. So
    # every stage starts from identically rounded weights.
    return run_dtype(config) if engine_config.zero_stage == 3 else torch.float32


def run_dtype(config: RunConfig) -> torch.dtype:
    """Return the dtype that the run computes in."""
    dtype: torch.dtype = getattr(torch, config.precision.dtype)
    return dtype


def partitioning_of(engine_config: EngineConfig, mesh: Mesh) -> Partitioning:
    """Return the sharding and partitioning applied while the model is constructed."""
    if shards_parameters(mesh):
        zero3 = copy_of(engine_config.deepspeed) if engine_config.zero_stage == 3 else None
        return sharded_partitioning(mesh, zero3)
    if engine_config.zero_stage != 3:
        return WHOLE

    def construct() -> AbstractContextManager[Any]:
        # No overrides: constructors keep the dtype they ask for, so rotary buffers stay float32.
        context: AbstractContextManager[Any] = PartitioningInit(
            config_dict_or_path=copy_of(engine_config.deepspeed), tensor_overrides=[]
        )
        return context

    def gather(parameters: list[nn.Parameter]) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(
            parameters, modifier_rank=0
        )
        return context

    return Partitioning(construct, gather, dist.get_rank() == 0)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move all buffers to `device`; buffers that modules share stay shared. DeepSpeed moves the
    buffers of a full model only (0.19.8, runtime/engine.py, `_configure_distributed_model`)."""
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, moved.setdefault(id(buffer), buffer.to(device)))


def copy_of(value: Any) -> Any:
    """Return a deep copy of JSON values, since `deepspeed.initialize` changes its configuration."""
    if isinstance(value, dict):
        return {key: copy_of(item) for key, item in value.items()}
    return [copy_of(item) for item in value] if isinstance(value, (list, tuple)) else value


def shards_parameters(mesh: Mesh) -> bool:
    """Return whether ranks hold parts of parameters, before ZeRO partitions them."""
    return mesh.topology.tensor_size > 1 or mesh.topology.expert_size > 1


def sharded_partitioning(mesh: Mesh, zero3: dict[str, Any] | None) -> Partitioning:
    """Build a model whose parameters are sharded over `mesh.tensor`, or its experts over
    `mesh.expert`. Full parameters take no memory until they are filled, one layer at a time; then
    this rank keeps its shard, and with ZeRO-3 (`zero3`: DeepSpeed's dict) its partition of the
    shard."""
    partition = None
    if zero3 is not None:
        # Partitions full parameters over the replicas, as `zero.Init` does in constructors.
        partition = deepspeed.zero.Init(
            module=nn.Module(),
            data_parallel_group=mesh.replicas,
            config_dict_or_path=zero3,
            mpu=ModelParallelUnit(mesh),
            tensor_overrides=[],
        )

    @contextmanager
    def gather(parameters: list[nn.Parameter]) -> Iterator[None]:
        yield
        for parameter in parameters:
            cut_parameter(parameter)
        if partition is not None:
            partition_parameters(partition, parameters)

    def prepare(model: Any) -> None:
        plan = None
        if mesh.topology.tensor_size > 1:
            from bigtrain.models.parallel.tensor import shard_model, tensor_plan

            plan = tensor_plan(model)
        if mesh.topology.expert_size > 1:
            from bigtrain.models.parallel.collectives import GroupRows
            from bigtrain.models.parallel.experts import check_experts_of_plan, shard_experts

            if plan is not None:
                check_experts_of_plan(model, plan)
            shard_experts(model, GroupRows(mesh.expert), None if plan is None else mesh.tensor)
            set_expert_groups(mesh.expert, mesh.expert_replicas)
            for parameter in model.parameters():
                if is_expert(parameter):
                    mark_expert(parameter, name_of_experts(mesh.topology.expert_size))
        if plan is not None:
            shard_model(model, plan, mesh.tensor)

    return Partitioning(nullcontext, gather, writes_weights=True, prepare=prepare)


def register_external_parameters(model: nn.Module) -> None:
    """Make ZeRO 3 gather the parameters of other modules that peft's layers read, and all
    parameters of an MLP at once if it is computed in tiles. DeepSpeed gathers parameters for the
    module that owns them, and for modules for which they are registered as external."""
    from bigtrain.models.layers.tiled_mlp import parameters_inside, tiled_modules

    borrowed = borrowed_parameters(model) if has_adapters(model) else ()
    tiled = ((module, parameters_inside(module)) for module in tiled_modules(model))
    for layer, parameters in (*borrowed, *tiled):
        for parameter in parameters:
            deepspeed.zero.register_external_parameter(layer, parameter)


def apply_layer_options(
    model: Any,
    config: RunConfig,
    engine_config: EngineConfig,
    device: torch.device,
    plan: ModelPlan,
    *,
    chunked_loss: ChunkedLoss | None,
) -> bool:
    """Apply the run's noise on embeddings, kernels, tiles, activation offload and compilation to a
    complete `model` (split into its stage, filled, `chunked_loss` installed); return whether its
    layers, and the loss of chunks, are compiled. Raises ModelError if decoder layers of
    transformers' kind are needed and there are none."""
    section = config.model
    if section.neftune_noise_alpha is not None:
        from bigtrain.models.layers.embedding_noise import add_embedding_noise

        parts = config.parallel.degrees.sequence_size
        add_embedding_noise(model, section.neftune_noise_alpha, parts)
    # Kernels and tiles replace modules, so that they come before compilation.
    fast_path = fast_path_of(config, engine_config, model.config, device.type, plan.compilation)
    if fast_path.kernels == "liger":
        apply_kernels(model)
    plan.tiles.install(model)
    if section.activation_offload:
        from bigtrain.models.layers.activation_offload import offload_checkpoints

        offload_checkpoints(model, device.type)
    if not fast_path.compiles:
        return False
    if chunked_loss is not None:
        chunked_loss.compile()
    if section.tiled_mlp != "off":
        from bigtrain.models.layers.tiled_mlp import compile_tiles

        compile_tiles(model)
    if config.parallel.tensor > 1:
        from bigtrain.models.parallel.recurrent_layers import set_local_attributes

        set_local_attributes(model)
    if config.parallel.expert > 1:
        from bigtrain.models.parallel.experts import compile_divided_experts

        compile_divided_experts(model)
    keeps_stacks_out = False
    if has_adapters(model):
        from bigtrain.models.layers.adapters import keep_stacks_out_of_graphs
        from bigtrain.models.weights.quantized import weight_in_graph

        keeps_stacks_out = keep_stacks_out_of_graphs(model)
        trace_dora(model, weight_in_graph)
    from bigtrain.models.layers.recurrence.functions import has_replaced_functions

    facts = read_facts(config, engine_config.deepspeed, None)
    # Parts of layers that are computed outside of graphs.
    counts_tokens = any(True for _ in modules_of_experts(model))
    has_parts_outside = counts_tokens or keeps_stacks_out or has_replaced_functions(model)
    compile_layers(model, divided=facts.divides_layers or has_parts_outside)
    return True
