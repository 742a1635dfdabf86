"""What is left out of DeepSpeed's step changes no bit; each private part is as it was read."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
import os
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch
from deepspeed import comm
from deepspeed.ops.op_builder.builder import CUDAOpBuilder, OpBuilder
from deepspeed.runtime import constants
from deepspeed.runtime import utils as runtime_utils
from deepspeed.runtime.base_optimizer import BackwardHookStateManager
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaleConfig
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero import partition_parameters, partitioned_param_coordinator
from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3, zero3_linear_wrap
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer, GradPartitionBufferGroup
from deepspeed.runtime.zero.utils import apply_to_tensors_only
from deepspeed.utils import groups, mixed_precision_linkage, nvtx, set_z3_leaf_module
from deepspeed.utils.tensor_fragment import fragment_address, tensor_fragment
from deepspeed.utils.timer import SynchronizedWallClockTimer
from torch.distributed import distributed_c10d

from bigtrain.engine.deepspeed_patches import (
    bf16_update,
    flat_gradients,
    host_time,
    optimizers,
    partitions,
    pipeline,
    startup,
    step,
    zero3_hooks,
    zero12_reduction,
    zero12_update,
)
from bigtrain.engine.deepspeed_patches.step import skip_overflow_check
from bigtrain.engine.startup.process_group import process_group
from bigtrain.settings.deepspeed.engine_config import NEVER_PRINT_STEPS
from bigtrain.system.world import World
from tests.support.contracts import (
    Contract,
    has,
    is_as_read,
    public_functions,
    reads,
    sets,
    takes,
    title,
)

# The largest finite gradient of float16 in every place has a norm that float32 holds.
BAD = {"nan": math.nan, "inf": math.inf, "minus inf": -math.inf, "large": 65504.0, "none": 1.0}


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with process_group(World(0, 1, 0)):
        yield


def train(value: float, dtype: torch.dtype, *, whole: bool) -> list[object]:
    """Three steps, of which the second has `value` in one gradient: weights, norms, scales."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(3, 5, generator=generator).to(dtype) for _ in range(4)]
    parameters = [torch.nn.Parameter(weight) for weight in weights]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.0}]
    optimizer = FP16_UnfusedOptimizer(
        torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1),
        low_precision_dtype=dtype,
        dynamic_loss_scale=dtype == torch.float16,
        dynamic_loss_args={
            "init_scale": 2.0**4,
            "scale_window": 2,
            "min_scale": 1.0,
            "delayed_shift": 1,
        },
        clip_grad=1.0,
        verbose=False,
    )
    if not whole:
        skip_overflow_check(optimizer)
    numbers: list[object] = []
    for number in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn(3, 5, generator=generator).to(dtype)
        if number == 1:
            parameters[2].grad[1, 1] = value
        optimizer.step()
        scale = optimizer.loss_scale_config.cur_scale
        numbers += [optimizer.overflow, float(optimizer._global_grad_norm), float(scale)]
        numbers += [parameter.tolist() for parameter in parameters]
        numbers += [state["step"].item() for state in optimizer.optimizer.state.values()]
    return numbers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", BAD.values(), ids=BAD.keys())
def test_the_norm_finds_what_the_overflow_check_finds(value: float, dtype: torch.dtype) -> None:
    numbers = train(value, dtype, whole=False)
    assert numbers == train(value, dtype, whole=True)
    assert (True in [f for f in numbers if isinstance(f, bool)]) == (not math.isfinite(value))


def test_float16_of_zero_0_is_scaled_before_the_backward_pass() -> None:
    """DeepSpeed does not, and divides the gradients by the scale all the same."""
    loss = torch.tensor(3.0)
    for dtype, scaled in ((torch.float16, 3.0 * 2**4), (torch.bfloat16, 3.0)):
        config = LossScaleConfig(
            dtype,
            True,
            1.0,
            {"init_scale": 2.0**4, "scale_window": 2, "min_scale": 1.0, "delayed_shift": 1},
        )
        optimizer = SimpleNamespace(loss_scale_config=config, loss_scale=config.cur_scale)
        assert float(step.scaled_loss(loss, optimizer)) == scaled
        state = optimizers.scaler_state(optimizer)
        assert bool(state) == (dtype == torch.float16)
        optimizers.restore_scaler(optimizer, {**state, "cur_scale": 2.0**9} if state else {})
        assert config.cur_scale == (2.0**9 if state else 1.0)
    assert step.scaled_loss(loss, SimpleNamespace()) is loss  # ZeRO 1 to 3, which DeepSpeed scales


# --- contracts ---


def scaler() -> DynamicLossScaler:
    return DynamicLossScaler(1.0, 1000, 1.0, 1, False)


def comm_torch() -> ModuleType:
    """By name: as an attribute of deepspeed.comm it is PyTorch."""
    return importlib.import_module("deepspeed.comm.torch")


def _always(owner: object) -> Callable[[], object]:
    return lambda: owner


_ENGINE, _INIT = map(_always, (DeepSpeedEngine, Init))
_CONVERT = _always(Init._convert_to_deepspeed_param)
_STEP_WRAPPERS = _ZERO12, _ZERO3, _BF16, _FP16, _UNFUSED = tuple(
    map(
        _always,
        (
            DeepSpeedZeroOptimizer,
            DeepSpeedZeroOptimizer_Stage3,
            BF16_Optimizer,
            FP16_Optimizer,
            FP16_UnfusedOptimizer,
        ),
    )
)

_LINEAR = ("input", "weight", "bias")

# What `zero12_reduction` does instead, and what it relies on for that.
_REDUCTION = {
    "create_gradient_handling_hooks": "b84ceb8d3356",
    "process_gradients": "a05fe9cac73c",
    "setup_buckets": "82266aa4880f",
    "reduce_ready_partitions_and_remove_grads": "46ef5f92c1b8",
    "reduce_independent_p_g_buckets_and_remove_grads": "500839d3f30c",
    "reduce_gradients": "385b8e94b1d3",
    "reduce_ipg_grads": "a41525b603f1",
    "average_tensor": "6fd000d730e5",
    "allreduce_and_scatter": "403393091a48",
    "allreduce_and_copy_with_multiple_ranks": "e826693368e3",
    "allreduce_bucket": "bf7fd5c84c68",
    "copy_grads_in_partition": "110f723937b9",
    "independent_gradient_partition_epilogue": "26ceef6d75b3",
    "get_all_grad_tensors": "412137c5d2d6",
    "_get_flat_partition_unpadded": "af538d9d2c01",
    "finalize_gradient_accumulation_boundary": "92863a666a49",
    "has_overflow_partitioned_grads_serial": "03c4bba82790",
    "free_grad_in_param_list": "c679dd3df8e9",
    "clear_backward_seen_flag": "34ffe6eb0b74",
    "_fill_param_grad_accum_attribute": "b6548a1b1448",
    "initialize_gradient_partition": "c9639269026c",
    "_use_compact_grad_partition_buffer": "b4b53eb20083",
    "_build_compact_grad_partition_buffer": "54c896878ee9",
    "_get_compact_grad_partition_slice": "386a91e4390c",
    "_get_preflattened_grad_partition": "5efe338fec79",
    "_release_ipg_buffers": "e344b6e31fec",
}

# What `bf16_update` does instead.
_BF16_UPDATE = {
    "_update_hp_grad": "026f6bb3edea",
    "clear_hp_grads": "82cb16a0c5b9",
    "backward_prologue": "411f078ab35b",
    "clear_lp_grads": "455d9b064085",
    "get_grads_for_norm": "81ed7f0b119f",
    "step": "9b21d4a28f87",
    "update_lp_params": "128911db918a",
}

# What `zero12_update` does instead.
_ZERO12_UPDATE = {
    "step": "9520884fd916",
    "update_lp_params": "3cdce069e3c6",
    "unscale_and_clip_grads": "6bf2ce6f97ea",
    "scaled_global_norm": "63c6a6fe100c",
}

CONTRACTS = [
    # step
    reads(
        step.skip_overflow_check,
        lambda: FP16_UnfusedOptimizer.step,
        "self.overflow_checker.check()",
        "is_invalid_grad_norm(self._global_grad_norm)",
        "if self.fused_lamb_legacy:",
    ),
    sets(step.skip_overflow_check, _UNFUSED, "overflow_checker fused_lamb_legacy"),
    takes(
        step.skip_redundant_work,
        lambda: DeepSpeedEngine.allreduce_no_retain,
        "self bucket dp_group numel_per_bucket dp_world_size",
    ),
    *(
        has(step.skip_redundant_work, _ENGINE, name)
        for name in ("communication_data_type", "get_data_types", "gradient_predivide_factor")
    ),
    reads(step.speed_up_hooks, lambda: nvtx, "if enable_nvtx and not is_compiling():"),
    reads(
        step.speed_up_hooks,
        lambda: DeepSpeedZeRoOffload,
        "module.pre_bwd_fn = PreBackwardFunctionForModule",
        "module.post_bwd_fn = PostBackwardFunctionModule",
    ),
    reads(
        step.speed_up_hooks,
        lambda: torch.autograd.function,
        "inspect.signature(func)",
    ),
    takes(step.speed_up_hooks, lambda: LinearFunctionForZeroStage3.forward, *_LINEAR),
    Contract(
        step.skip_redundant_work_of_zero12,
        "ZeRO-3 has round_robin_bit16_groups, too",
        lambda: "round_robin_bit16_groups" not in inspect.getsource(DeepSpeedZeroOptimizer_Stage3),
    ),
    is_as_read(
        step.take_norms_at_once,
        lambda: DeepSpeedZeroOptimizer.get_grad_norm_direct,
        "72af0993ad8c",
    ),
    # bf16_update
    *(
        is_as_read(
            bf16_update.shorten_bf16_update, lambda n=name: getattr(BF16_Optimizer, n), digest
        )
        for name, digest in _BF16_UPDATE.items()
    ),
    is_as_read(
        bf16_update.shorten_bf16_update,
        lambda: runtime_utils.clip_tensors_by_global_norm,
        "7acb1d957631",
    ),
    is_as_read(
        bf16_update.shorten_bf16_update,
        lambda: DeepSpeedEngine._reduce_non_expert_gradients,
        "673162100f8a",
    ),
    is_as_read(
        bf16_update.shorten_bf16_update,
        lambda: DeepSpeedEngine.buffered_allreduce_fallback,
        "c36145108c4f",
    ),
    # zero12_update
    *(
        is_as_read(
            zero12_update.FusedUpdate, lambda n=name: getattr(DeepSpeedZeroOptimizer, n), digest
        )
        for name, digest in _ZERO12_UPDATE.items()
    ),
    sets(
        zero12_update.can_fuse_update,
        _ZERO12,
        "compute_grad_norm check_grad_overflow torch_autocast_gradscaler "
        "single_partition_of_fp32_groups parallel_partitioned_bit16_groups",
    ),
    # zero12_reduction
    *(
        is_as_read(
            zero12_reduction.replace_reduction, lambda n=name: getattr(DeepSpeedZeroOptimizer, n), d
        )
        for name, d in _REDUCTION.items()
    ),
    is_as_read(
        zero12_reduction.replace_reduction, lambda: BackwardHookStateManager, "edd0f6c2b461"
    ),
    is_as_read(flat_gradients.FlatGradients, lambda: GradPartitionBufferGroup, "46362cc2ad91"),
    reads(
        zero12_reduction.replace_reduction,
        lambda: DeepSpeedZeroOptimizer.step,
        "self.free_grad_in_param_list(self.params_not_in_partition[i])",
        "flat_grad_partition = self._get_preflattened_grad_partition(i)",
    ),
    reads(
        zero12_reduction.replace_reduction,
        lambda: DeepSpeedEngine._take_model_step,
        "self.optimizer.zero_grad()",
    ),
    sets(
        zero12_reduction.replace_reduction,
        _ZERO12,
        "contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce cpu_offload "
        "zenflow has_moe_layers round_robin_gradients autoep_folding_tp_group "
        "round_robin_bit16_padding real_dp_process_group gradient_accumulation_dtype "
        "sequence_parallel_size communication_data_type gradient_average",
    ),
    # host_time
    reads(
        host_time.time_reductions,
        lambda: DeepSpeedZeroOptimizer_Stage3.create_reduce_and_remove_grad_hooks,
        "self.reduce_ready_partitions_and_remove_grads(param)",
    ),
    reads(
        host_time.time_reductions,
        _ZERO12,
        "            self.reduce_ready_partitions_and_remove_grads(param, i)",
    ),
    *(
        reads(host_time.time_reductions, lambda k=kind: k, "self.allreduce_gradients(")
        for kind in (DeepSpeedEngine, PipelineEngine)
    ),
    # zero3_hooks
    is_as_read(zero3_hooks.replace_hooks, lambda: DeepSpeedZeRoOffload, "9faa882304a6"),
    is_as_read(zero3_hooks.replace_hooks, lambda: PartitionedParameterCoordinator, "81dc103e6510"),
    reads(
        zero3_hooks.replace_hooks,
        _INIT,
        "self._partition_param(param, has_been_updated=has_been_updated, free_data=free_data)",
        "if param.ds_tensor is not None and not has_been_updated:",
        "free_param(param)",
    ),
    reads(
        zero3_hooks.replace_hooks, lambda: partitioned_param_coordinator, "ENABLE_PROFILER = False"
    ),
    takes(
        zero3_hooks.replace_hooks, lambda: apply_to_tensors_only, "function value warning_msg_fn"
    ),
    reads(zero3_hooks.replace_hooks, lambda: set_z3_leaf_module, "model._z3_leaf = flag"),
    takes(zero3_hooks.replace_hooks, lambda: zero3_linear_wrap, "input weight bias"),
    takes(step.replace_clipping, lambda: DeepSpeedEngine.clip_fp32_gradients, "self"),
    reads(
        step.replace_clipping,
        lambda: DeepSpeedEngine._take_model_step,
        "self.clip_fp32_gradients()",
        "self.gradient_clipping() > 0.0",
    ),
    *(sets(step.measured_norm, wrapper, "_global_grad_norm") for wrapper in _STEP_WRAPPERS),
    *(sets(step.has_overflowed, wrapper, "overflow") for wrapper in _STEP_WRAPPERS),
    # optimizers
    *(sets(optimizers.inner_optimizer, wrapper, "optimizer") for wrapper in _STEP_WRAPPERS),
    sets(optimizers.updating_optimizers, _ZERO3, "backup_optimizer"),
    *(
        reads(
            optimizers.undo_trial_update,
            lambda w=wrapper: w().initialize_optimizer_states,
            ".step()",
        )
        for wrapper in _STEP_WRAPPERS[3:]
    ),
    sets(optimizers.is_zero3, _ZERO3, "fp32_partitioned_groups_flat"),
    sets(optimizers.zero0_layout, _FP16, "fp16_groups fp32_groups_flat"),
    sets(optimizers.zero0_layout, _UNFUSED, "fp16_groups fp32_groups"),
    Contract(
        optimizers.zero0_masters,
        "FP16_UnfusedOptimizer keeps its masters flat as FP16_Optimizer does",
        lambda: "self.fp32_groups_flat" not in inspect.getsource(FP16_UnfusedOptimizer),
    ),
    sets(optimizers.flat_partitions, _ZERO12, "single_partition_of_fp32_groups"),
    sets(optimizers.flat_partitions, _BF16, "fp32_groups_flat_partition"),
    sets(
        optimizers.zero12_ranges,
        _ZERO12,
        "round_robin_bit16_groups round_robin_bit16_offsets real_dp_process_group partition_size",
    ),
    reads(optimizers.zero12_ranges, _ZERO12, "flat_group.narrow(0, offset, meta.numel())"),
    reads(optimizers.refresh_parameters, _ZERO3, "param.ds_secondary_tensor = None"),
    sets(optimizers.zero12_ranges, _BF16, "bf16_groups"),
    reads(
        optimizers.zero12_ranges,
        lambda: mixed_precision_linkage.link_hp_params,
        "_hp_mapping = get_hp_fragment_mapping(",
    ),
    Contract(
        optimizers.zero12_ranges,
        "fragments of masters have other fields",
        lambda: (
            {"lp_fragment_address", "hp_fragment_address", "param_group_index"}
            <= {field.name for field in dataclasses.fields(tensor_fragment)}
            and {"start", "numel"} <= {field.name for field in dataclasses.fields(fragment_address)}
        ),
    ),
    sets(optimizers.masters_of_group, _ZERO3, "sub_group_to_group_id"),
    reads(
        optimizers.masters_of_group,
        _ZERO3,
        "self.optimizer.param_groups[param_group_id]['params'] = [fp32_param]",
        "self.optimizer.param_groups[param_group_id]['params'] = []",
    ),
    *(
        takes(optimizers.refresh_parameters, lambda w=wrapper: w().update_lp_params, "self")
        for wrapper in (_STEP_WRAPPERS[0], _STEP_WRAPPERS[2])
    ),
    Contract(
        optimizers.refresh_parameters,
        "ZeRO-3 or a wrapper of ZeRO 0 has update_lp_params, too",
        lambda: (
            not any(
                hasattr(kind, "update_lp_params")
                for kind in (DeepSpeedZeroOptimizer_Stage3, FP16_Optimizer, FP16_UnfusedOptimizer)
            )
        ),
    ),
    reads(
        optimizers.refresh_parameters,
        _ZERO3,
        "def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id):",
    ),
    sets(optimizers.refresh_parameters, _ZERO3, "persistent_parameters fp16_groups"),
    sets(optimizers.refresh_parameters, _CONVERT, "partition all_gather"),
    *(
        sets(function, wrapper, "loss_scaler")
        for function in (optimizers.scaler_state, optimizers.restore_scaler)
        for wrapper in _STEP_WRAPPERS[:2]
    ),
    *(
        sets(function, wrapper, "loss_scale_config")
        for function in (optimizers.scaler_state, optimizers.restore_scaler, step.scaled_loss)
        for wrapper in _STEP_WRAPPERS[3:]
    ),
    Contract(
        optimizers.scaler_state,
        "LossScaleConfig has other fields",
        lambda: (
            {"use_grad_scaling", "cur_scale", "cur_iter", "last_overflow_iter"}
            <= {field.name for field in dataclasses.fields(LossScaleConfig)}
        ),
    ),
    reads(
        step.scaled_loss,
        _ENGINE,
        "if isinstance(self.optimizer, ZeROOptimizer):\n"
        "                loss = self.optimizer.scale_if_loss(loss)",
    ),
    reads(
        step.scale_of_norm,
        lambda: FP16_UnfusedOptimizer.step,
        "self._global_grad_norm = get_global_norm(norm_list=norm_groups)",
    ),
    reads(
        step.scale_of_norm,
        _FP16,
        "self._global_grad_norm = scaled_global_grad_norm / self.loss_scale_config.cur_scale",
    ),
    Contract(
        optimizers.scaler_state,
        "DynamicLossScaler has other fields",
        lambda: (
            {"cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"}
            <= vars(scaler()).keys()
        ),
    ),
    *(
        sets(optimizers.kept_gradients, wrapper, "averaged_gradients")
        for wrapper in _STEP_WRAPPERS[:2]
    ),
    # partitions
    reads(
        partitions.PartitioningInit,
        lambda: Init._zero_init_param,
        "self._convert_to_deepspeed_param(param)",
        "dist.broadcast(param.data",
        "param.partition()",
    ),
    takes(partitions.PartitioningInit, _CONVERT, "self param"),
    takes(
        partitions.partition_parameters, lambda: Init._convert_to_zero_parameters, "self param_list"
    ),
    sets(partitions.partition_of, _INIT, "ds_tensor"),
    sets(partitions.frozen_range, _CONVERT, "ds_process_group"),
    sets(partitions.zero3_range, _CONVERT, "ds_numel"),
    sets(partitions.zero3_range, _INIT, "ds_tensor.ds_numel"),
    reads(
        partitions.zero3_range,
        _ZERO3,
        "self.grad_position[param_id] = [int(i), int(current_offset), int(num_elements)]",
    ),
    takes(partitions.zero3_range, lambda: DeepSpeedZeroOptimizer_Stage3.get_param_id, "self param"),
    takes(
        partitions.zero3_range,
        lambda: DeepSpeedZeroOptimizer_Stage3._get_param_partition_rank,
        "self param",
    ),
    # ZeRO 3 takes the norm itself, and goes by the same mark.
    reads(
        step.is_model_parallel,
        lambda: DeepSpeedZeroOptimizer_Stage3,
        "counts_every_rank or is_model_parallel_parameter(p) or (self.model_parallel_rank == 0)",
    ),
    reads(
        step.is_model_parallel,
        lambda: DeepSpeedZeroOptimizer_Stage3,
        "self.get_grad_norm_direct(self.averaged_gradients[i], self.fp16_groups[i])",
    ),
    reads(
        step.is_model_parallel,
        lambda: runtime_utils.is_model_parallel_parameter,
        "p.tensor_model_parallel",
    ),
    reads(
        step.mark_model_parallel,
        lambda: runtime_utils.get_weight_norm,
        "is_model_parallel_parameter(p)",
    ),
    reads(
        step.mark_model_parallel,
        lambda: FP16_UnfusedOptimizer.step,
        "get_weight_norm(grads_for_norm, mpu=self.mpu)",
    ),
    reads(
        "bigtrain.models.parallel.sharding.tag_shard",
        lambda: runtime_utils.is_model_parallel_parameter,
        "p.tensor_model_parallel",
    ),
    sets("bigtrain.models.layers.parameters.local_shape", _CONVERT, "ds_shape"),
    Contract(
        step.is_replicated,
        "the mark of replicated parameters has another name",
        lambda: constants.PIPE_REPLICATED == "ds_pipe_replicated",
    ),
    reads(step.mark_replicated, _ZERO12, "p.ds_pipe_replicated"),
    reads(step.mark_replicated, _FP16, "p.ds_pipe_replicated"),
    reads(step.mark_replicated, _BF16, "lp.ds_pipe_replicated"),
    # pipeline
    reads(
        pipeline.replace_loss,
        lambda: PipelineEngine._exec_forward_pass,
        "self.loss = self.module.loss_fn(outputs, labels)",
    ),
    reads(
        pipeline.replace_instructions,
        lambda: PipelineEngine._exec_schedule,
        "MethodType(self._INSTRUCTION_MAP[type(cmd)], self)",
    ),
    Contract(
        pipeline.replace_instructions,
        "the table of instructions lacks ReduceTiedGrads or OptimizerStep",
        lambda: (
            PipelineEngine._INSTRUCTION_MAP[schedule.ReduceTiedGrads]
            and PipelineEngine._INSTRUCTION_MAP[schedule.OptimizerStep]
            is PipelineEngine._exec_optimizer_step
        ),
    ),
    takes(
        pipeline.run_optimizer_step, lambda: PipelineEngine._exec_optimizer_step, "self lr_kwargs"
    ),
    reads(
        pipeline.forget_batch_times,
        lambda: PipelineEngine.train_batch,
        "self.timers(TRAIN_BATCH_TIMER).stop()",
    ),
    takes(
        pipeline.fill_gradient,
        lambda: BF16_Optimizer._update_hp_grad,
        "self lp group_idx param_idx clear_lp_grads",
    ),
    sets(pipeline.fill_gradient, _BF16, "bf16_groups"),
    sets(pipeline.accumulated_gradient, _BF16, "fp32_groups_gradient_dict"),
    sets(pipeline.accumulated_gradient, lambda: BF16_Optimizer._update_hp_grad, "_hp_grad"),
    sets(pipeline.accumulated_gradient, _ZERO12, "use_grad_accum_attribute grad_accum"),
    # startup
    reads(startup.set_mpu, _ENGINE, "groups.mpu = self.mpu"),
    has(startup.set_mpu, lambda: groups, "mpu"),
    has(startup.destroyed_groups, lambda: distributed_c10d._world, "pg_map"),
    reads(
        startup.destroyed_groups,
        lambda: comm.destroy_process_group,
        "groups._release_process_group_references(group=None if destroy_world else group)",
    ),
    has(startup.restore_process_state, lambda: groups, "_release_process_group_references"),
    reads(
        startup.restore_process_state,
        lambda: partition_parameters,
        "torch.nn.functional.linear = zero3_linear_wrap",
    ),
    # By the source: inside of `process_group` they are replaced.
    reads(
        startup.operators_loaded_by,
        lambda: OpBuilder,
        "def jit_load(self, verbose=True):",
        "return self.jit_load(verbose)",
        "from torch.utils.cpp_extension import load",
        "op_module = load(name=self.name,",
    ),
    reads(startup.operators_loaded_by, comm_torch, "def build_shm_op():"),
    reads(
        startup.operators_loaded_by,
        lambda: comm_torch().TorchBackend,
        "self.shm_comm_op = build_shm_op()",
    ),
]


def test_deepspeed_reads_architectures_without_letters_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    builder = type("Builder", (CUDAOpBuilder,), {"absolute_name": str, "sources": list})("any")
    builder.jit_mode = True
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a;10.0f+PTX")
    with pytest.raises(ValueError, match="0a"):
        builder.compute_capability_args()
    with startup._plain_architectures():
        assert os.environ["TORCH_CUDA_ARCH_LIST"] == "9.0;10.0+PTX"
        builder.compute_capability_args()
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == "9.0a;10.0f+PTX"


def test_a_function_that_carries_its_signature_is_not_inspected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = torch.nn.Linear(2, 2)
    step.speed_up_hooks(model)
    weight, bias = model.weight, model.bias
    data = torch.randn(3, 2, requires_grad=True)
    expected = torch.nn.functional.linear(data, weight, bias)
    inspected: list[object] = []
    real = inspect._signature_from_function  # type: ignore[attr-defined]
    monkeypatch.setattr(
        inspect, "_signature_from_function", lambda *a, **k: inspected.append(a) or real(*a, **k)
    )
    output = LinearFunctionForZeroStage3.apply(data, weight, bias)
    assert torch.equal(output, expected)
    assert torch.equal(LinearFunctionForZeroStage3.apply(data, weight), data @ weight.t())
    assert inspected == []


@pytest.mark.parametrize("contract", CONTRACTS, ids=title)
def test_deepspeed_is_as_it_was_read(contract: Contract) -> None:
    contract.check("deepspeed")


def test_every_patch_has_a_contract() -> None:
    rooms = (host_time, optimizers, partitions, pipeline, startup, step, zero3_hooks)
    rooms += (flat_gradients, zero12_reduction, zero12_update)
    wanted = set().union(*map(public_functions, rooms))
    assert wanted - {contract.name for contract in CONTRACTS} == {
        # only ours
        "GroupGradients",
        "HostTime",
        "MasterRange",
        "SpeedPatch",
        "counts_in_norm",
        "has_own_hooks",
        "replaced",
        "speed_patches_in_place",
    }


@pytest.mark.parametrize(("steps_per_print", "num_kept"), [(NEVER_PRINT_STEPS, 0), (10, 3)])
def test_times_of_batches_are_kept_only_to_be_printed(steps_per_print: int, num_kept: int) -> None:
    timers = SynchronizedWallClockTimer()
    engine = SimpleNamespace(steps_per_print=lambda: steps_per_print, timers=timers)
    for _ in range(3):
        timers("train_batch").start()
        timers("train_batch").stop()
        pipeline.forget_batch_times(engine)
    assert len(timers("train_batch").event_timers) == num_kept
