"""The costs of a model's layers, traced from the real transformers module on the meta device.

A dispatch mode sees every operation of a forward pass, saved-tensor hooks see what autograd keeps,
and hooks on the decoder layers attribute both; the model's own plan says what tensor parallelism
divides: everything between a column-parallel module and the next row-parallel module. Attention is
replaced by a function that saves what fused kernels save (queries, keys, values, output,
log-sum-exp), since on the meta device sdpa takes the path that saves the scores.

Equal layers run once: layers whose modules have equal classes and numbers, and whose parameters and
arguments have equal shapes. Without values their costs are equal;
`tests/unit/models/test_meta_trace.py` compares the costs with a trace of every layer.
"""

from __future__ import annotations

import copy
import functools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

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
from bigtrain.models.layers.parameters import listed_layers
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
from bigtrain.models.torch_patches import OperatorMode, shadow, storage_of, unshadow
from bigtrain.models.tracing.fusion import Dataflow
from bigtrain.models.transformers_patches import modules_of_experts
from bigtrain.planner.model_costs import (
    Attention,
    FusedCosts,
    LayerCosts,
    Matmul,
    MlpCosts,
    ModelCosts,
)
from bigtrain.planner.scans import DeltaRule, scan_of

_NAME = "bigtrain_traced"
Side = Literal["in", "out"] | None
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "linear", "matmul"}


class _FusedAttention(torch.autograd.Function):
    """Output shape and saved tensors of a fused attention kernel."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # In the memory order of the queries, as kernels write the output. With tokens before heads
        # the next product needs no copy.
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


@dataclass
class _Mlp:
    """Sums over the operations of the MLPs of a layer that can be computed in tiles."""

    saved_replicated: float = 0.0
    saved_divided: float = 0.0
    moved: float = 0.0
    products: float = 0.0
    num_kernels: int = 0
    largest: int = 0
    largest_expert: int = 0


@dataclass
class _Layer:
    """Sums over the operations of a layer. num_replicated, num_divided, num_expert: elements of
    parameters that all tensor-parallel ranks have, that they divide, and of stacked experts."""

    matmuls: list[Matmul] = field(default_factory=list)
    attention: Attention | None = None
    saved_replicated: float = 0.0
    saved_divided: float = 0.0
    moved_replicated: float = 0.0
    moved_divided: float = 0.0
    num_kernels: int = 0
    num_replicated: int = 0
    num_divided: int = 0
    num_expert: int = 0
    num_tensors: int = 0
    mlp: _Mlp = field(default_factory=_Mlp)
    passes_states: bool = False
    dataflow: Dataflow = field(default_factory=Dataflow)
    constants: set[int] = field(default_factory=set)
    state_columns: int = 0
    num_equal_parts: int = 0
    num_groups: int = 0

    def costs(self, tokens: int) -> LayerCosts:
        mlp, fused = self.mlp, self.dataflow.sums(self.constants)
        products = sum(m.in_size * m.out_size * m.share for m in self.matmuls)
        return LayerCosts(
            num_parameters_whole=self.num_replicated,
            num_parameters_cut=self.num_divided,
            num_parameters_expert=self.num_expert,
            num_tensors=self.num_tensors,
            matmuls=tuple(
                replace(matmul, count=number) for matmul, number in Counter(self.matmuls).items()
            ),
            attention=self.attention,
            saved_bytes_whole=self.saved_replicated / tokens,
            saved_bytes_cut=self.saved_divided / tokens,
            moved_bytes_whole=self.moved_replicated / tokens,
            moved_bytes_cut=self.moved_divided / tokens,
            num_kernels=self.num_kernels,
            # Shares of the layer's matrix products and other moved bytes, in addition to sums.
            mlp=MlpCosts(
                mlp.saved_replicated / tokens,
                mlp.saved_divided / tokens,
                mlp.largest,
                mlp.largest_expert,
                mlp.products / max(1.0, products),
                mlp.moved / max(1.0, self.moved_replicated + self.moved_divided),
                mlp.num_kernels,
            ),
            passes_states=self.passes_states,
            num_equal_parts=self.num_equal_parts,
            num_groups=self.num_groups,
            fused=FusedCosts(
                fused.saved_replicated / tokens,
                fused.saved_divided / tokens,
                fused.moved_replicated / tokens,
                fused.moved_divided / tokens,
                fused.mlp_saved_replicated / tokens,
                fused.mlp_saved_divided / tokens,
                fused.mlp_moved / max(1.0, fused.moved_replicated + fused.moved_divided),
                fused.num_kernels,
            ),
            state_columns=self.state_columns,
        )


class _Tracer(OperatorMode):
    """Adds up operations by the layer that is running."""

    def __init__(self, tokens: int, hidden_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tokens, self.hidden_size = tokens, hidden_size
        self.layers: dict[int, _Layer] = {}
        self.current: _Layer | None = None
        self.is_divided = False  # whether tensor parallelism divides what is running
        self.side: Side = None  # that is divided in the running product: "in", "out" or None
        self.parameter_storages: set[int] = set()
        self.mlp: _Mlp | None = None  # that is running
        self.mlp_inputs: set[int] = set()
        self.saved_outside = 0.0
        self._saved: dict[int, torch.Tensor] = {}
        # Tensors made before the layers and used by all (rotary embeddings), which no layer saves.
        # They stay alive, or their addresses would be reused.
        self._outside: list[torch.Tensor] = []
        self._inside: list[torch.Tensor] = []
        self.shared: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "aten::_grouped_mm":
            # Its shape function supports only bfloat16, while kernels support more.
            rows, stack = args[0], args[1]
            result = rows.new_empty((*rows.shape[:-1], stack.shape[-1]))
        else:
            result = func(*args, **(kwargs or {}))
        if self.current is not None:
            self._count(func, args, result)
        else:
            created = list(tensors_in(result))
            self._outside += created
            self.shared.update(
                storage_of(t) for t in created if t.dim() and t.shape[-1] != self.hidden_size
            )
        return result

    def _count(self, func: Any, args: Any, result: Any) -> None:
        """Add a kernel's costs to the sums of the running layer."""
        assert self.current is not None
        outputs, inputs = list(tensors_in(result)), list(tensors_in(args))
        storages = {storage_of(t) for t in inputs}
        name = func.name().partition("::")[2].partition(".")[0]
        if all(storage_of(t) in storages for t in outputs) and not name.endswith("_"):
            return  # a view, for which no kernel runs
        self.current.num_kernels += 1
        if self.mlp is not None:
            self.mlp.num_kernels += 1
        self._inside += (*inputs, *outputs)
        self.current.dataflow.add(
            name,
            {storage_of(t): t.numel() * t.element_size() for t in inputs},
            {storage_of(t): t.numel() * t.element_size() for t in outputs},
            is_product=name in _PRODUCTS,
            is_divided=self.is_divided,
            is_in_mlp=self.mlp is not None,
        )
        # A matrix product, with a weight or between activations.
        if name in _PRODUCTS:
            output = outputs[0]
            weights = [
                t for t in inputs if storage_of(t) in self.parameter_storages and t.dim() >= 2
            ]
            if not weights:  # scores of an attention outside the registry, or a scan
                left_factor = inputs[-2] if len(inputs) >= 2 else output
                share = output.numel() / output.shape[-1] / self.tokens
                side: Side = "out" if self.is_divided else None
                self.current.matmuls.append(
                    Matmul(left_factor.shape[-1], output.shape[-1], side, 1, share)
                )
            else:
                weight, num_outputs = weights[0], output.shape[-1]
                rows = output.numel() // num_outputs
                groups = weight.shape[0] if weight.dim() == 3 else 1
                num_inputs = (
                    next(n for n in weight.shape[-2:][::-1] if n != num_outputs)
                    if (weight.shape[-1] != weight.shape[-2])
                    else num_outputs
                )
                self.current.matmuls.append(
                    Matmul(num_inputs, num_outputs, self.side, groups, rows / self.tokens)
                )
            if self.mlp is not None:
                last = self.current.matmuls[-1]
                self.mlp.products += last.in_size * last.out_size * last.share
            return
        # All other kernels take the time of the bytes that they read and write.
        size = sum(t.numel() * t.element_size() for t in (*inputs, *outputs))
        if self.mlp is not None:
            self.mlp.moved += size
        if self.is_divided:
            self.current.moved_divided += size
        else:
            self.current.moved_replicated += size

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Count what autograd saves inside, every storage once."""

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            key = storage_of(tensor)
            if key in self.parameter_storages or key in self.shared or key in self._saved:
                return tensor
            if self.current is None:
                if tensor.is_floating_point() and tensor.shape[-1:] == (self.hidden_size,):
                    self._saved[key] = tensor
                    self.saved_outside += tensor.untyped_storage().nbytes()
                return tensor
            self._saved[key] = tensor  # alive, or its address would be reused
            size = tensor.untyped_storage().nbytes()
            is_divided = self.is_divided and self.side != "out"
            mlp = None if key in self.mlp_inputs else self.mlp
            self.current.dataflow.save(key, size, is_divided=is_divided, is_in_mlp=mlp is not None)
            for sums in (self.current, mlp):
                if sums is not None and is_divided:
                    sums.saved_divided += size
                elif sums is not None:
                    sums.saved_replicated += size
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield


def trace_model(
    hf_config: PreTrainedConfig, dtype: torch.dtype, sequence_length: int = 128
) -> ModelCosts:
    """Return costs of the model that `hf_config` describes, trained in `dtype`. Takes a second or
    two, no memory and no device. Raises ModelError if transformers cannot run it on the meta
    device."""
    try:
        with torch.random.fork_rng(devices=[]):  # constructors may draw numbers
            return _trace(hf_config, dtype, sequence_length)
    except (*MODEL_FAILURES, ArithmeticError) as error:
        reason = failure_text(error)
        raise ModelError(
            f"model_type {hf_config.model_type} cannot be traced on the meta device: {reason}"
        ) from error


def _trace(hf_config: PreTrainedConfig, dtype: torch.dtype, sequence_length: int) -> ModelCosts:
    config = copy.deepcopy(hf_config)
    tracer = _Tracer(sequence_length, int(text_config(config).hidden_size))
    AttentionInterface.register(_NAME, functools.partial(_attend, tracer=tracer))
    AttentionMaskInterface.register(_NAME, lambda *args, **kwargs: None)
    config.use_cache = False
    with torch.device("meta"):
        # Without memory there is nothing to draw weights into.
        with no_init_weights():
            try:
                model = AutoModelForCausalLM.from_config(
                    config, dtype=dtype, attn_implementation=_NAME
                )
            except (ValueError, ImportError):
                model = AutoModelForCausalLM.from_config(config, dtype=dtype)
            add_mtp_layers(model, config)
        # Recurrent layers pad samples to multiples of the chunk.
        chunks = {getattr(module, "chunk_size", 0) for module in model.modules()} - {0}
        sequence_length = math.lcm(sequence_length, *(n for n in chunks if isinstance(n, int)))
        tracer.tokens = sequence_length
        ids = torch.zeros(1, sequence_length, dtype=torch.int64)
    model.tie_weights()  # what no_init_weights also skips
    model.train()
    count = getattr(text_config(config), "num_hidden_layers", None)
    layers = [layer for _, layer in listed_layers(model, count)]

    # Run the model with all hooks.
    mtp = mtp_layers(model)
    if mtp is not None:
        layers += mtp.layers
    tracer.parameter_storages = {storage_of(p) for p in model.parameters()}
    with ExitStack() as stack:
        stack.enter_context(_watched(model, layers, tracer))
        stack.enter_context(document_boundaries(packed=False))
        stack.enter_context(tracer.saving())
        stack.enter_context(tracer)
        if mtp is not None:
            stack.enter_context(_followed_by(model, mtp, ids))
        model(input_ids=ids, use_cache=False)
    return _collected(model, layers, tracer, sequence_length, dtype)


@contextmanager
def _followed_by(
    model: PreTrainedModel, mtp: MultiTokenLayers, ids: torch.Tensor
) -> Iterator[None]:
    """Inside, the layers for multi-token prediction run after the model's layers."""

    def run(_module: nn.Module, _inputs: object, outputs: Any) -> None:
        for _ in mtp.hidden_states(model, outputs.last_hidden_state, ids, None):
            pass

    with model.get_decoder().register_forward_hook(run):
        yield


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    tracer: _Tracer,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface, without a kernel: tensors are [batch, heads, tokens,
    size]."""
    if tracer.current is not None:
        window = options.get("sliding_window")
        tracer.current.attention = Attention(
            query.shape[1], key.shape[1], query.shape[-1], value.shape[-1], window
        )
    output: torch.Tensor = _FusedAttention.apply(query, key, value)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2).contiguous(), None


@contextmanager
def _watched(model: PreTrainedModel, layers: list[nn.Module], tracer: _Tracer) -> Iterator[None]:
    """Hook the layers: the tracer follows which layer runs, and what tensor parallelism divides."""

    def begin(index: int, *_: Any) -> None:
        tracer.current, tracer.is_divided = tracer.layers.setdefault(index, _Layer()), False

    def reuse_costs(index: int, first: int) -> None:
        tracer.layers[index] = tracer.layers[first]

    with ExitStack() as hooks:
        for index, layer in enumerate(layers):
            begins = functools.partial(begin, index)
            hooks.enter_context(layer.register_forward_pre_hook(begins))
            hooks.enter_context(layer.register_forward_hook(_sets(tracer, current=None)))
        for handle in (*_mlp_hooks(model, tracer), *_division_hooks(model, tracer)):
            hooks.enter_context(handle)
        hooks.enter_context(run_once(layers, reuse_costs))
        yield


def _mlp_hooks(model: PreTrainedModel, tracer: _Tracer) -> Iterator[Any]:
    """Hook the MLPs that can be computed in tiles."""
    stacked = {name for name, entry in parameter_roles(model).items() if entry.is_stacked}

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
        begins = functools.partial(begin, size, any(n.startswith(f"{name}.") for n in stacked))
        yield module.register_forward_pre_hook(begins, with_kwargs=True)
        yield module.register_forward_hook(_sets(tracer, mlp=None))


def _division_hooks(model: PreTrainedModel, tracer: _Tracer) -> Iterator[Any]:
    """Hook the modules between which tensor parallelism divides activations."""
    plan = known_plan(model)
    experts = set(modules_of_experts(model))
    opens = _sets(tracer, side=None, is_divided=True)
    closes = _sets(tracer, side=None, is_divided=False)
    for name, module in model.named_modules():
        style = plan.get(name, "")
        if style in ("colwise", "packed_colwise", COLWISE):
            yield module.register_forward_pre_hook(_sets(tracer, side="out"))
            yield module.register_forward_hook(opens)
        elif style == ROWWISE_TO_SHARES:
            yield module.register_forward_pre_hook(_sets(tracer, side="in"))
            yield module.register_forward_hook(opens)
        elif style in ("rowwise", "packed_rowwise", ROWWISE):
            yield module.register_forward_pre_hook(_sets(tracer, side="in"))
            yield module.register_forward_hook(closes)
        elif module in experts or style == "moe_tp_experts":
            yield module.register_forward_pre_hook(opens)
            yield module.register_forward_hook(closes)


def _sets(tracer: _Tracer, **values: Any) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        for name, value in values.items():
            setattr(tracer, name, value)

    return hook


def _collected(
    model: PreTrainedModel,
    layers: list[nn.Module],
    tracer: _Tracer,
    tokens: int,
    dtype: torch.dtype,
) -> ModelCosts:
    plan, scan = known_plan(model), scan_of(text_config(model.config))
    names = {module: name for name, module in model.named_modules()}
    stacked = {name for name, entry in parameter_roles(model).items() if entry.is_stacked}
    divisions = {name: division for name, _, division in recurrent_divisions(model)}
    distinct_costs: list[LayerCosts] = []
    order: list[int] = []
    for index, layer in enumerate(layers):
        # Parameters that tensor and expert parallelism replicate, divide, or distribute as experts.
        sums = replace(tracer.layers.get(index, _Layer()))  # a copy: equal layers share their sums
        for leaf, parameter in layer.named_parameters():
            sums.num_tensors += 1
            name = f"{names[layer]}.{leaf}"
            style = plan.get(name) or plan.get(name.rpartition(".")[0], "")
            if name in stacked:
                sums.num_expert += parameter.numel()
            elif "colwise" in style or "rowwise" in style:
                sums.num_divided += parameter.numel()
            else:
                sums.num_replicated += parameter.numel()
        sums.constants = tracer.parameter_storages | tracer.shared
        functions = {name for _, _, names in layers_with_functions(layer) for name in names}
        sums.passes_states = bool(functions)
        for name, division in divisions.items():
            if f"{name}.".startswith(f"{names[layer]}."):
                sums.num_equal_parts = math.gcd(sums.num_equal_parts, division.num_equal_parts)
                sums.num_groups = division.groups
        if isinstance(scan, DeltaRule) and any(
            FUNCTIONS[n].kind == MATRIX for n in functions & FUNCTIONS.keys()
        ):
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
    return ModelCosts(
        hidden_size=int(text_config(model.config).hidden_size),
        vocabulary_size=int(embedding.shape[0]),
        kinds=tuple(distinct_costs),
        layers=tuple(order),
        tied=tied,
        embedding_parameters=embedding.numel(),
        head_parameters=head_parameters,
        num_other_parameters=total - num_in_layers - embedding.numel() - head_parameters,
        source="traced",
        element_bytes=dtype.itemsize,
        saved_bytes_outside=tracer.saved_outside / tokens,
        num_further_losses=num_trained_mtp_layers(model.config),
    )


_INDICES = {"layer_idx", "layer_id", "layer_index", "layer_number", "block_idx", "idx"}
"""Attributes in which modules store their position in the model."""


@contextmanager
def run_once(layers: Sequence[nn.Module], on_repeat: Callable[[int, int], None]) -> Iterator[None]:
    """While the context is open, a layer with an earlier layer's structure and call arguments
    returns that layer's outputs without running; `on_repeat(index, first_index)` is called then."""
    outputs: dict[Hashable, tuple[int, Any]] = {}

    def forward_once(index: int, layer: nn.Module) -> Callable[..., Any]:
        plain_forward, structure = layer.forward, _structure(layer)

        def forward(*args: Any, **kwargs: Any) -> Any:
            key = (structure, _call_key(args), _call_key(kwargs))
            if key in outputs:
                first, output = outputs[key]
                on_repeat(index, first)
                return output
            output = plain_forward(*args, **kwargs)
            outputs[key] = (index, output)
            return output

        return forward

    # Attributes of instances, which hide the methods of their classes.
    for index, layer in enumerate(layers):
        shadow(layer, "forward", forward_once(index, layer))
    try:
        yield
    finally:
        for layer in layers:
            unshadow(layer, "forward")


def _structure(layer: nn.Module) -> Hashable:
    """Return classes and numbers of a layer's modules, and the parameters' shapes."""
    modules = tuple(
        (
            name,
            type(module),
            tuple(
                (key, value)
                for key, value in vars(module).items()
                if key not in _INDICES and _is_plain(value)
            ),
        )
        for name, module in layer.named_modules()
    )
    shapes = tuple((name, tuple(p.shape), p.dtype) for name, p in layer.named_parameters())
    return modules, shapes


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _call_key(value: Any) -> Hashable:
    """Return shapes of tensors, plain values, and types of further values in arguments."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    if isinstance(value, tuple | list):
        return tuple(_call_key(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _call_key(item)) for key, item in value.items())
    if _is_plain(value):
        plain: Hashable = value
        return plain
    return "of type", f"{type(value)}"
