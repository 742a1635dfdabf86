"""Expert parallelism of any Hugging Face causal LM by the plan that the model itself carries
(``base_model_ep_plan``, transformers 5), or by the modules that keep the contract.

The contract of experts' modules: weights stacked along their first dimension, [experts, ...], and a
forward method of (hidden states [T, h], chosen experts [T, k], their weights [T, k]) whose result
[T, h] is the sum of the chosen experts' outputs, times their weights. A rank keeps the rows of a
part of the experts; each token's hidden state is sent to the ranks of the token's experts, which
return their outputs. No token is dropped. `bigtrain.models.equivalence.expert_parallel` tests the
contract.

Shapes: T = tokens of this rank, k = experts chosen for each, n = rows that this rank receives.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from bigtrain.errors import ModelError
from bigtrain.models.experts import EXCHANGE, EXCHANGED
from bigtrain.models.parallel.collectives import Group, RowExchange, exchange_rows, summed
from bigtrain.models.parallel.sharding import Shard, even_ranges, full_shape, tag_shard
from bigtrain.models.torch_patches import shadow, shadowed
from bigtrain.models.transformers_patches import expanded_plan

_MODULE, _STACK = "ep_dispatch_experts", "grouped_gemm"
_DISPATCH = "bigtrain_dispatch"
_ARGUMENTS = ("self", "hidden_states", "top_k_index", "top_k_weights")


@dataclass(frozen=True)
class Experts:
    """A module of experts, and its stacked parameters by their name in the module. The first
    dimension of a stack has equally many rows for every expert, in the experts' order."""

    name: str
    module: Any
    stacks: dict[str, nn.Parameter]

    @property
    def num_experts(self) -> int:
        return int(self.module.num_experts)


def expert_modules(model: PreTrainedModel) -> list[Experts]:
    """Return the modules of experts in the model's plan, or without a plan the modules that keep
    the contract. Raises ModelError for an architecture without modules of experts, and for experts
    that do not fit the plan."""
    experts = _planned_experts(model) or _stacked_experts(model)
    if not experts:
        raise ModelError(
            f"parallel.expert: transformers has no expert-parallel plan for model_type "
            f"{model.config.model_type}, and it has no modules of equally long stacks that are "
            "called with tokens, their experts and weights -> parallel.expert=1, and "
            "parallel.tensor or ZeRO 3 for models too large for one device"
        )
    return experts


def _planned_experts(model: PreTrainedModel) -> list[Experts]:
    """Return the modules of experts in the model's plan. Raises ModelError for other stacks than in
    the plan."""
    plan = expanded_plan(model, dict(model.ep_plan or {}))
    modules = dict(model.named_modules(remove_duplicate=False))
    experts = []
    for name, style in plan.items():
        if style != _MODULE or name not in modules:
            continue
        stacks = {
            leaf: parameter
            for leaf, parameter in modules[name].named_parameters()
            if plan.get(f"{name}.{leaf}") == _STACK
        }
        lengths = {parameter.shape[0] for parameter in stacks.values()}
        if lengths != {getattr(modules[name], "num_experts", None)}:
            raise ModelError(
                f"parallel.expert: {name}: its experts are not stacked as in its plan -> "
                "parallel.expert=1"
            )
        experts.append(Experts(name, modules[name], stacks))
    return experts


def _stacked_experts(model: PreTrainedModel) -> list[Experts]:
    """Return modules of `num_experts` experts that are called by the contract, and whose parameters
    all have the rows of the experts in their order (Dbrx)."""
    experts = []
    for name, module in model.named_modules():
        num_experts = getattr(module, "num_experts", None)
        if not isinstance(num_experts, int) or num_experts < 2:
            continue
        stacks = dict(module.named_parameters())
        arguments = tuple(inspect.signature(type(module).forward).parameters)
        shapes = [full_shape(parameter) for parameter in stacks.values()]
        are_stacks = all(len(shape) > 1 and shape[0] % num_experts == 0 for shape in shapes)
        if arguments == _ARGUMENTS and are_stacks:
            experts.append(Experts(name, module, stacks))
    return experts


def shard_experts(
    model: PreTrainedModel, exchange: RowExchange, tensor: Group | None = None
) -> None:
    """Make `model` compute a rank's share of the experts for all ranks of `exchange`: forward
    methods exchange rows, and parameters are tagged with their shards.

    tensor: tensor-parallel ranks, which share tokens and experts (in different `exchange` groups):
    each rank sends a slice of the tokens. The output is then partial, like the output of experts
    sharded by tensor parallelism; `tensor.shard_model`, called afterwards, sums the outputs by the
    plan's rule for sharded experts.

    No weights move: the caller that fills the parameters splits them (`sharding.cut_parameter`),
    and the model must not be called before. Call this before a pipeline stage removes layers. Not
    collective. Raises ModelError for a model without a plan, and for experts that do not divide.
    """
    for experts in expert_modules(model):
        check_divides(experts, exchange.size)
        module, num_local_experts = experts.module, experts.num_experts // exchange.size
        for parameter in experts.stacks.values():
            shape = tuple(parameter.shape)
            rows_per_expert = shape[0] // experts.num_experts
            num_rows = num_local_experts * rows_per_expert
            span = (exchange.rank * num_rows, (exchange.rank + 1) * num_rows)
            primary = tensor is None or dist.get_rank(tensor) == 0
            tag_shard(parameter, Shard(shape, 0, (span,), num_rows, primary=primary, over="expert"))
            if tensor is not None and parameter.requires_grad:
                parameter.register_hook(partial(summed, group=tensor))
        dispatch = _Dispatch(module, experts.num_experts, exchange)
        shadow(module, EXCHANGE, exchange)
        shadow(module, _DISPATCH, dispatch)
        forward = dispatch if tensor is None else _TokenSlice(dispatch, tensor)
        # A compiled layer is divided here: a graph cannot contain the number of exchanged rows.
        shadow(module, "forward", torch.compiler.disable(forward.__call__, reason=EXCHANGED))


def compile_divided_experts(model: nn.Module) -> None:
    """Make divided experts of `model` compile, at their first call, the computation of the rows
    that a rank receives. A graph is for any number of rows but 1."""
    for module in model.modules():
        if _DISPATCH in vars(module):
            vars(module)[_DISPATCH].compile()


def check_divides(experts: Experts, size: int) -> None:
    """Raise ModelError if `size` does not divide the number of experts."""
    if experts.num_experts % size:
        divisors = (n for n in range(1, size) if experts.num_experts % n == 0)
        raise ModelError(
            f"parallel.expert = {size}: does not divide the {experts.num_experts} experts of "
            f"{experts.name} -> nearest: {max(divisors)}"
        )


def check_experts_of_plan(model: PreTrainedModel, plan: dict[str, str]) -> None:
    """Raise ModelError if the tensor-parallel `plan` does not sum the experts' outputs."""
    for experts in expert_modules(model):
        if plan.get(experts.name) != "moe_tp_experts":
            raise ModelError(
                f"parallel.expert: {experts.name}: the model's tensor-parallel plan does not say "
                "that ranks compute a part of it each -> parallel.expert=1, or parallel.tensor=1"
            )


class _TokenSlice:
    """Calls `dispatch` for this rank's slice of the tokens; the output of all other tokens is
    zero."""

    def __init__(self, dispatch: _Dispatch, tensor: Group) -> None:
        self._dispatch = dispatch
        self._size, self._rank = dist.get_world_size(tensor), dist.get_rank(tensor)

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        expert_ids, expert_weights, hidden = (
            x.reshape(-1, x.shape[-1]) for x in (top_k_index, top_k_weights, hidden_states)
        )
        num_tokens = hidden.shape[0]
        start, stop = even_ranges(num_tokens, self._size, self._rank)
        span = slice(start, stop)
        outputs = self._dispatch(hidden[span], expert_ids[span], expert_weights[span])
        return F.pad(outputs, (0, 0, start, num_tokens - stop)).view(hidden_states.shape)


class _Dispatch:
    """The forward method of a module of experts that ranks divide."""

    def __init__(self, module: Any, num_experts: int, exchange: RowExchange) -> None:
        self._module = module
        self._forward = module.forward
        self._num_experts = num_experts
        self._exchange = exchange
        self._sum = _sum_by_token

    def compile(self) -> None:
        """Compile the forward method of this rank's experts, and the sum of a token's outputs; the
        exchanges stay outside of graphs."""
        self._forward = torch.compile(self._forward, dynamic=True)
        self._sum = torch.compile(_sum_by_token, dynamic=False)

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        num_chosen = top_k_index.shape[-1]
        hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
        expert_ids = top_k_index.reshape(-1)
        order = torch.argsort(expert_ids, stable=True)  # a rank's experts are adjacent

        # Count rows, int64 [ranks, experts of a rank]: the rows that this rank sends (`counts`),
        # and the rows that it receives from each rank (`local_counts`). The host waits once, for
        # the numbers of rows by rank; the output length of `bincount` would make it wait again.
        one_row_per_rank = [1] * self._exchange.size
        counts = expert_ids.new_zeros(self._num_experts, dtype=torch.int64)
        counts = counts.scatter_add_(0, expert_ids, torch.ones_like(expert_ids))
        counts = counts.view(self._exchange.size, -1)
        local_counts = self._exchange.rows(counts, one_row_per_rank, one_row_per_rank)
        sent, received = torch.stack([counts.sum(1), local_counts.sum(1)]).tolist()

        # Hidden states go to the ranks of the experts, ordered by sender and expert.
        rows = exchange_rows(hidden[order // num_chosen], sent, received, self._exchange)
        num_ranks, num_local_experts = local_counts.shape
        local_ids = torch.arange(num_local_experts, device=rows.device).repeat(num_ranks)
        local_ids = local_ids.repeat_interleave(local_counts.flatten(), output_size=rows.shape[0])
        is_idle = rows.shape[0] == 0
        if is_idle:
            # A row of zeros goes through the first expert and its output is dropped, so that
            # every parameter gets a (zero) gradient, for which ZeRO waits on all ranks.
            rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
            local_ids = local_ids.new_zeros(1)
        ones = rows.new_ones(rows.shape[0], 1)  # the rank of the token applies the weights
        # The number is local only inside the call: initialization needs the full number.
        with shadowed(self._module, {"num_experts": num_local_experts}):
            outputs: torch.Tensor = self._forward(rows, local_ids.unsqueeze(1), ones)
        outputs = outputs.reshape(rows.shape[0], -1)
        outputs = outputs[:0] if is_idle else outputs

        # Outputs return to the ranks of the tokens.
        outputs = exchange_rows(outputs, received, sent, self._exchange)
        total = self._sum(outputs, order, top_k_weights)
        return total.to(hidden_states.dtype).view(hidden_states.shape)


def _sum_by_token(
    outputs: torch.Tensor, order: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum [T, h] of each token's rows in `outputs` [T k, h], which are ordered
    by expert: row i belongs to choice order[i], counted token by token. transformers adds outputs
    up in the same way (integrations/moe.py, grouped_mm_experts_forward), in the common dtype of
    weights and outputs."""
    inverse_order = torch.empty_like(order)
    inverse_order[order] = torch.arange(order.numel(), device=order.device)
    weighted = outputs[inverse_order] * top_k_weights.reshape(-1, 1)
    return weighted.view(-1, top_k_weights.shape[-1], weighted.shape[-1]).sum(1)
