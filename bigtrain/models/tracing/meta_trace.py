"""The costs of a model's layers, traced from the real transformers module on the meta device.

A dispatch mode sees every operation of a forward pass, saved-tensor hooks see the tensors that
autograd keeps, and hooks on the decoder layers attribute operations and tensors to layers. Tensor
parallelism divides everything between a column-parallel module and the next row-parallel module of
the model's plan. A function replaces attention, and saves the tensors that fused kernels save
(queries, keys, values, output, log-sum-exp): on the meta device, sdpa would save the scores.

Equal layers run once (`repeated_layers`), since without values their costs are equal;
`tests/unit/models/test_meta_trace.py` compares the costs with a trace of every layer.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

from bigtrain.errors import ModelError
from bigtrain.models.configuration import num_trained_mtp_layers, text_config
from bigtrain.models.equivalence.proxy_model import MODEL_FAILURES, failure_text
from bigtrain.models.layers.document_masks import document_boundaries
from bigtrain.models.layers.multi_token import MultiTokenLayers, add_mtp_layers, mtp_layers
from bigtrain.models.layers.parameter_roles import parameter_roles
from bigtrain.models.layers.parameters import freeze, listed_layers
from bigtrain.models.layers.recurrence.functions import FUNCTIONS, MATRIX, layers_with_functions
from bigtrain.models.layers.tiled_mlp import find_mlps
from bigtrain.models.parallel.recurrent_divisions import (
    COLWISE,
    ROWWISE,
    ROWWISE_TO_SHARES,
    recurrent_divisions,
)
from bigtrain.models.parallel.stage_layout import tensors_in
from bigtrain.models.parallel.tensor import known_plan
from bigtrain.models.torch_patches import storage_of
from bigtrain.models.tracing.operator_trace import LayerSums, OperatorTrace
from bigtrain.models.tracing.repeated_layers import run_once
from bigtrain.models.transformers_patches import modules_of_experts
from bigtrain.planner.model_costs import (
    Attention,
    LayerCosts,
    ModelCosts,
)
from bigtrain.planner.scans import DeltaRule, scan_of

_TRACED_ATTENTION = "bigtrain_traced"


class _FusedAttention(torch.autograd.Function):
    """Output shape and saved tensors of a fused attention kernel."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # Kernels write the output in the memory order of the queries. With tokens before heads, the
        # product after attention needs no copy.
        samples, heads, tokens, size = q.shape
        if v.shape[-1] == size:
            out = torch.empty_like(q)
        else:
            out = q.new_empty((samples, tokens, heads, v.shape[-1])).transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise NotImplementedError("traced forward only")


def trace_model(
    hf_config: PreTrainedConfig,
    dtype: torch.dtype,
    sequence_length: int = 128,
    *,
    frozen: Sequence[str] = (),
) -> ModelCosts:
    """Return costs of the model that `hf_config` describes, trained in `dtype` except for the
    parameters whose names match a pattern of `frozen`. Takes a second or two, no memory and no
    device. Raises ModelError if transformers cannot run the model on the meta device."""
    try:
        with torch.random.fork_rng(devices=[]):  # constructors may draw numbers
            return _trace(hf_config, dtype, sequence_length, frozen)
    except (*MODEL_FAILURES, ArithmeticError) as error:
        reason = failure_text(error)
        raise ModelError(
            f"model_type {hf_config.model_type} cannot be traced on the meta device: {reason}"
        ) from error


def _trace(
    hf_config: PreTrainedConfig, dtype: torch.dtype, sequence_length: int, frozen: Sequence[str]
) -> ModelCosts:
    """Build the model on the meta device, trace a forward pass, and return the costs."""
    config = copy.deepcopy(hf_config)
    tracer = OperatorTrace(sequence_length, int(text_config(config).hidden_size))
    AttentionInterface.register(_TRACED_ATTENTION, functools.partial(_attend, tracer=tracer))
    AttentionMaskInterface.register(_TRACED_ATTENTION, lambda *args, **kwargs: None)
    config.use_cache = False
    with torch.device("meta"):
        # Without memory there is nothing to draw weights into.
        with no_init_weights():
            try:
                model = AutoModelForCausalLM.from_config(
                    config, dtype=dtype, attn_implementation=_TRACED_ATTENTION
                )
            except (ValueError, ImportError):
                model = AutoModelForCausalLM.from_config(config, dtype=dtype)
            add_mtp_layers(model, config)
        # Recurrent layers pad samples to multiples of the chunk; the sample here has no padding.
        chunk_sizes = {getattr(module, "chunk_size", 0) for module in model.modules()} - {0}
        sequence_length = math.lcm(sequence_length, *(n for n in chunk_sizes if isinstance(n, int)))
        tracer.tokens = sequence_length
        ids = torch.zeros(1, sequence_length, dtype=torch.int64)
    model.tie_weights()  # no_init_weights skips tying too
    model.train()
    freeze(model, frozen)
    num_layers = getattr(text_config(config), "num_hidden_layers", None)
    layers = [layer for _, layer in listed_layers(model, num_layers)]

    # Run the model with all hooks.
    mtp = mtp_layers(model)
    if mtp is not None:
        layers += mtp.layers
    tracer.parameter_storages = {storage_of(p) for p in model.parameters()}
    tracer.frozen_storages = {storage_of(p) for p in model.parameters() if not p.requires_grad}
    with ExitStack() as stack:
        stack.enter_context(_hooked_layers(model, layers, tracer))
        stack.enter_context(document_boundaries(packed=False))
        stack.enter_context(tracer.saving())
        stack.enter_context(tracer)
        if mtp is not None:
            stack.enter_context(_mtp_layers_run_after(model, mtp, ids))
        model(input_ids=ids, use_cache=False)
    return _model_costs(model, layers, tracer, sequence_length, dtype)


@contextmanager
def _mtp_layers_run_after(
    model: PreTrainedModel, mtp: MultiTokenLayers, ids: torch.Tensor
) -> Iterator[None]:
    """Inside, the layers for multi-token prediction `mtp` run after the model's layers."""

    def run(_module: nn.Module, _inputs: object, outputs: Any) -> None:
        for _ in mtp.hidden_states(model, outputs.last_hidden_state, ids, None):
            pass  # each step of the iterator runs a layer

    with model.get_decoder().register_forward_hook(run):
        yield


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    tracer: OperatorTrace,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Follow transformers' attention interface without a kernel, and record the sizes. Tensors are
    [batch, heads, tokens, size]; the output is [batch, tokens, heads, size]."""
    if tracer.current is not None:
        window = options.get("sliding_window")
        tracer.current.attention = Attention(
            query.shape[1], key.shape[1], query.shape[-1], value.shape[-1], window
        )
    output: torch.Tensor = _FusedAttention.apply(query, key, value)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2).contiguous(), None


@contextmanager
def _hooked_layers(
    model: PreTrainedModel, layers: list[nn.Module], tracer: OperatorTrace
) -> Iterator[None]:
    """Hook the model so that the tracer knows which layer and MLP runs, and whether tensor
    parallelism divides its tensors. Equal `layers` run once."""

    def begin(index: int, *_: Any) -> None:
        tracer.current, tracer.is_divided = tracer.layers.setdefault(index, LayerSums()), False

    def reuse_costs(index: int, first: int) -> None:
        tracer.layers[index] = tracer.layers[first]

    with ExitStack() as hooks:
        for index, layer in enumerate(layers):
            begin_layer = functools.partial(begin, index)
            hooks.enter_context(layer.register_forward_pre_hook(begin_layer))
            hooks.enter_context(layer.register_forward_hook(_setting_hook(tracer, current=None)))
        for handle in (*_mlp_hooks(model, tracer), *_division_hooks(model, tracer)):
            hooks.enter_context(handle)
        hooks.enter_context(run_once(layers, reuse_costs))
        yield


def _mlp_hooks(model: PreTrainedModel, tracer: OperatorTrace) -> Iterator[Any]:
    """Hook the MLPs that can be computed in tiles. Yield the hooks' handles."""
    expert_names = {name for name, role in parameter_roles(model).items() if role.is_stacked}

    def begin(size: int, has_experts: bool, _: nn.Module, args: Any, kwargs: Any) -> None:
        if tracer.current is None:
            return
        sums = tracer.mlp = tracer.current.mlp
        tracer.mlp_inputs = {storage_of(t) for t in tensors_in((*args, *kwargs.values()))}
        if has_experts:
            sums.largest_expert = max(sums.largest_expert, size)
        else:
            sums.largest = max(sums.largest, size)

    for name in find_mlps(model):
        module = model.get_submodule(name)
        size = sum(parameter.numel() for parameter in module.parameters())
        has_experts = any(expert_name.startswith(f"{name}.") for expert_name in expert_names)
        begin_mlp = functools.partial(begin, size, has_experts)
        yield module.register_forward_pre_hook(begin_mlp, with_kwargs=True)
        yield module.register_forward_hook(_setting_hook(tracer, mlp=None))


def _division_hooks(model: PreTrainedModel, tracer: OperatorTrace) -> Iterator[Any]:
    """Hook the modules between which tensor parallelism divides activations. Yield the hooks'
    handles."""
    plan = known_plan(model)
    experts = set(modules_of_experts(model))
    opens = _setting_hook(tracer, side=None, is_divided=True)
    closes = _setting_hook(tracer, side=None, is_divided=False)
    for name, module in model.named_modules():
        style = plan.get(name, "")
        if style in ("colwise", "packed_colwise", COLWISE):
            yield module.register_forward_pre_hook(_setting_hook(tracer, side="out"))
            yield module.register_forward_hook(opens)
        elif style == ROWWISE_TO_SHARES:
            yield module.register_forward_pre_hook(_setting_hook(tracer, side="in"))
            yield module.register_forward_hook(opens)
        elif style in ("rowwise", "packed_rowwise", ROWWISE):
            yield module.register_forward_pre_hook(_setting_hook(tracer, side="in"))
            yield module.register_forward_hook(closes)
        elif module in experts or style == "moe_tp_experts":
            yield module.register_forward_pre_hook(opens)
            yield module.register_forward_hook(closes)


def _setting_hook(tracer: OperatorTrace, **values: Any) -> Callable[..., None]:
    """Return a hook that sets attributes of `tracer` to `values`."""

    def hook(*_: Any) -> None:
        for name, value in values.items():
            setattr(tracer, name, value)

    return hook


def _model_costs(
    model: PreTrainedModel,
    layers: list[nn.Module],
    tracer: OperatorTrace,
    tokens: int,
    dtype: torch.dtype,
) -> ModelCosts:
    """Return the costs that `tracer` recorded for a sample of `tokens` tokens."""
    plan, scan = known_plan(model), scan_of(text_config(model.config))
    module_names = {module: name for name, module in model.named_modules()}
    expert_names = {name for name, role in parameter_roles(model).items() if role.is_stacked}
    divisions = {name: division for name, _, division in recurrent_divisions(model)}
    distinct_costs: list[LayerCosts] = []
    order: list[int] = []
    for index, layer in enumerate(layers):
        # Count the parameters that tensor and expert parallelism replicate, divide, or distribute
        # as experts; in a copy, since equal layers share their sums.
        sums = replace(tracer.layers.get(index, LayerSums()))
        for name_in_layer, parameter in layer.named_parameters():
            sums.num_tensors += 1
            name = f"{module_names[layer]}.{name_in_layer}"
            style = plan.get(name) or plan.get(name.rpartition(".")[0], "")
            num_frozen = 0 if parameter.requires_grad else parameter.numel()
            if name in expert_names:
                sums.num_expert += parameter.numel()
                sums.num_frozen_expert += num_frozen
            elif "colwise" in style or "rowwise" in style:
                sums.num_divided += parameter.numel()
                sums.num_frozen_divided += num_frozen
            else:
                sums.num_replicated += parameter.numel()
                sums.num_frozen_replicated += num_frozen
        sums.constants = tracer.parameter_storages | tracer.shared
        function_names = {name for _, _, names in layers_with_functions(layer) for name in names}
        sums.passes_states = bool(function_names)
        for name, division in divisions.items():
            if f"{name}.".startswith(f"{module_names[layer]}."):
                sums.num_equal_parts = math.gcd(sums.num_equal_parts, division.num_equal_parts)
                sums.num_groups = division.groups
        function_kinds = {FUNCTIONS[name].kind for name in function_names & FUNCTIONS.keys()}
        if isinstance(scan, DeltaRule) and MATRIX in function_kinds:
            sums.state_columns = scan.heads * scan.key_size
        costs = sums.costs(tokens)
        if costs not in distinct_costs:
            distinct_costs.append(costs)
        order.append(distinct_costs.index(costs))

    # Parameters outside the layers.
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is embedding
    num_in_layers = sum(distinct_costs[index].num_parameters for index in order)
    total = sum(p.numel() for p in model.parameters())
    head_parameters = 0 if tied or head is None else head.weight.numel()
    is_embedding_frozen = not embedding.requires_grad
    is_head_frozen = head is not None and not head.weight.requires_grad
    num_frozen_others = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    num_frozen_others -= sum(distinct_costs[index].num_frozen for index in order)
    num_frozen_others -= is_embedding_frozen * embedding.numel() + is_head_frozen * head_parameters
    return ModelCosts(
        hidden_size=int(text_config(model.config).hidden_size),
        vocabulary_size=int(embedding.shape[0]),
        kinds=tuple(distinct_costs),
        layers=tuple(order),
        tied=tied,
        embedding_parameters=embedding.numel(),
        head_parameters=head_parameters,
        num_other_parameters=total - num_in_layers - embedding.numel() - head_parameters,
        is_embedding_frozen=is_embedding_frozen,
        is_head_frozen=is_head_frozen,
        num_frozen_others=num_frozen_others,
        source="traced",
        element_bytes=dtype.itemsize,
        saved_bytes_outside=tracer.saved_outside / tokens,
        num_further_losses=num_trained_mtp_layers(model.config),
    )
