"""What DeepSpeed is told of experts, and that it still looks where it is told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from deepspeed.moe import utils as moe_utils
from deepspeed.runtime import utils as runtime_utils
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups

from bigtrain.engine.deepspeed_patches import experts
from tests.support.contracts import Contract, has, public_functions, reads, takes, title

CONTRACTS = [
    has(experts.set_expert_groups, lambda: groups, "_EXPERT_PARALLEL_GROUP"),
    has(experts.set_expert_groups, lambda: groups, "_EXPERT_DATA_PARALLEL_GROUP"),
    reads(
        experts.count_absent_gradients,
        lambda: BF16_Optimizer,
        "def get_grads_for_norm(self, for_clipping=False):",
        "expert_grads_for_norm[param_group['name']] = []",
        "return non_expert_grads_for_norm, expert_grads_for_norm",
    ),
    has(experts.count_absent_gradients, lambda: BF16_Optimizer, "get_grads_for_norm"),
    reads(
        experts.name_of_experts,
        lambda: groups._get_max_expert_size,
        "keylist.append(int(key.split('_')[index]))",
        "index = 2",
    ),
    reads(
        experts.set_expert_groups,
        lambda: groups._get_expert_data_parallel_group,
        "return _EXPERT_DATA_PARALLEL_GROUP[group_name]",
    ),
    reads(
        experts.set_expert_groups,
        lambda: groups._get_expert_parallel_group,
        "return _EXPERT_PARALLEL_GROUP[group_name]",
    ),
    reads(
        experts.mark_expert,
        lambda: moe_utils.is_moe_param,
        'hasattr(param, "allreduce") and not param.allreduce',
    ),
    reads(
        experts.mark_expert,
        lambda: Init._convert_to_deepspeed_param,
        'getattr(param, "ds_zero_partition_process_group", self.ds_process_group)',
    ),
    reads(
        experts.mark_expert,
        lambda: DeepSpeedZeroOptimizer_Stage3._autoep_expert_parallel_group,
        'getattr(param, "ds_zero_placement_family", "replicated")',
        '{"autoep_expert"}',
        'getattr(param, "ds_zero_partition_group_name", None)',
    ),
    # All replicas divide an expert's gradient, whoever adds it up.
    reads(
        experts.mark_expert,
        lambda: DeepSpeedZeroOptimizer_Stage3._gradient_averaging_world_size,
        "return dist.get_world_size(group=self.dp_process_group)",
    ),
    reads(
        experts.mark_expert,
        lambda: DeepSpeedZeroOptimizer.average_tensor,
        "tensor.div_(dist.get_world_size(group=self.dp_process_group)",
        "self.expert_dp_process_group[param.group_name] if is_moe_param(",
    ),
    reads(
        experts.mark_expert,
        lambda: DeepSpeedEngine._reduce_expert_gradients,
        "dp_world_size = dist.get_world_size(groups._get_data_parallel_group())",
        "ep_dp_group = groups._get_expert_data_parallel_group(ep_name)",
    ),
    reads(
        experts.as_expert_group,
        lambda: DeepSpeedZeroOptimizer,
        "'moe' in group and group['moe']",
        "self.expert_dp_process_group[group['name']]",
    ),
    reads(
        experts.as_expert_group,
        lambda: BF16_Optimizer._configure_moe_settings,
        "groups._get_expert_data_parallel_group(group['name'])",
    ),
    reads(
        experts.as_expert_group,
        lambda: moe_utils.configure_moe_param_groups,
        "any(['moe' in param_group for param_group in model_parameters])",
    ),
    takes(
        experts.engine_with_experts,
        lambda: DeepSpeedEngine._configure_distributed_model,
        "self model",
    ),
    reads(
        experts.engine_with_experts,
        lambda: DeepSpeedEngine._configure_distributed_model,
        "self.has_moe_layers = True",
    ),
    takes(
        experts.engine_with_experts,
        lambda: DeepSpeedEngine._validate_zero3_moe_compatibility,
        "self",
    ),
    # The norm: every element once.
    reads(
        experts.engine_with_experts,
        lambda: DeepSpeedZeroOptimizer_Stage3,
        "dist.all_reduce(total_norm_cuda, op=dist.ReduceOp.SUM, group=autoep_ep_group)",
    ),
    reads(
        experts.engine_with_experts,
        lambda: DeepSpeedZeroOptimizer.get_grad_norm_direct,
        "dist.all_reduce(total_norm, op=dist.ReduceOp.SUM, group=self.dp_process_group)",
    ),
    reads(
        experts.engine_with_experts,
        lambda: runtime_utils.get_norm_with_moe_layers,
        "moe_ep_group=groups._get_expert_parallel_group(exp_name)",
    ),
    reads(
        experts.fix_allgather_order,
        lambda: PartitionedParameterCoordinator,
        "def __all_gather_params(self, params: Set[Parameter], forward: bool) -> None:",
        "self.__all_gather_params(params_to_fetch, forward)",
        "self.__all_gather_params(params_to_prefetch, forward)",
    ),
]


@pytest.mark.parametrize("contract", CONTRACTS, ids=title)
def test_deepspeed_is_as_it_was_read(contract: Contract) -> None:
    contract.check("deepspeed")


def test_every_patch_has_a_contract() -> None:
    assert public_functions(experts) == {contract.name for contract in CONTRACTS}


def test_parameters_are_gathered_by_number() -> None:
    gathered: list[list[int]] = []
    coordinator = SimpleNamespace()
    name = "_PartitionedParameterCoordinator__all_gather_params"
    setattr(coordinator, name, lambda params, forward: gathered.append([p.ds_id for p in params]))
    offload = SimpleNamespace(get_param_coordinator=lambda: coordinator)
    experts.fix_allgather_order(SimpleNamespace(parameter_offload=offload))
    getattr(coordinator, name)([SimpleNamespace(ds_id=n) for n in (5, 2, 9)], True)
    assert gathered == [[2, 5, 9]]
    experts.fix_allgather_order(torch.optim.SGD([torch.zeros(1, requires_grad=True)]))
