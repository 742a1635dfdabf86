"""The costs of a model's layers, traced from the real transformers module on the meta device.

A dispatch mode sees every operation of a forward pass, saved-tensor hooks see what autograd keeps,
and hooks on the decoder layers attribute both; the model's own plan says what tensor parallelism
divides: everything between a column-parallel module and the next row-parallel one. Attention is
replaced by one that saves what fused kernels save (queries, keys, values, output, log-sum-exp),
since on the meta device sdpa takes the path that saves the scores.

Equal layers run once: those whose modules have the same classes and numbers, their parameters the
same shapes, and that are called with tensors of the same shapes. Without values they compute the
same; `tests/unit/models/test_meta_trace.py` compares it with every layer run.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
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
from bigtrain.models.layers.tiled_mlp import find_mlps
from bigtrain.models.parallel.stage_layout import tensors_in
from bigtrain.models.parallel.tensor import known_plan
from bigtrain.models.torch_patches import OperatorMode, shadow, storage_of, unshadow
from bigtrain.models.transformers_patches import modules_of_experts
from bigtrain.planner.model_costs import Attention, LayerCosts, Matmul, MlpCosts, ModelCosts

_NAME = "bigtrain_traced"
Side = Literal["in", "out"] | None
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "linear", "matmul"}


class _FusedAttention(torch.autograd.Function):
    """Output shape and saved tensors of a fused attention kernel."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # In the order in memory that queries have, as kernels write it. Where that is tokens before
        # heads, the next product needs no copy.
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
    """Sums over the operations of the MLPs of one layer that can be computed in tiles."""

    saved_whole: float = 0.0
    saved_cut: float = 0.0
    moved: float = 0.0
    products: float = 0.0
    num_kernels: int = 0
    largest: int = 0
    largest_expert: int = 0


@dataclass
class _Layer:
    """Sums over the operations of one layer."""

    matmuls: list[Matmul] = field(default_factory=list)
    attention: Attention | None = None
    saved_whole: float = 0.0
    saved_cut: float = 0.0
    moved_whole: float = 0.0
    moved_cut: float = 0.0
    num_kernels: int = 0
    parameters: tuple[int, int, int, int] = (0, 0, 0, 0)
    mlp: _Mlp = field(default_factory=_Mlp)

    def costs(self, tokens: int) -> LayerCosts:
        whole, cut, expert, num_tensors = self.parameters
        return LayerCosts(
            num_parameters_whole=whole,
            num_parameters_cut=cut,
            num_parameters_expert=expert,
            num_tensors=num_tensors,
            matmuls=tuple(
                replace(matmul, count=number) for matmul, number in Counter(self.matmuls).items()
            ),
            attention=self.attention,
            saved_bytes_whole=self.saved_whole / tokens,
            saved_bytes_cut=self.saved_cut / tokens,
            moved_bytes_whole=self.moved_whole / tokens,
            moved_bytes_cut=self.moved_cut / tokens,
            num_kernels=self.num_kernels,
            mlp=self._mlp_costs(tokens),
        )

    def _mlp_costs(self, tokens: int) -> MlpCosts:
        own = self.mlp
        products = sum(m.in_size * m.out_size * m.share for m in self.matmuls)
        return MlpCosts(
            own.saved_whole / tokens,
            own.saved_cut / tokens,
            own.largest,
            own.largest_expert,
            own.products / max(1.0, products),
            own.moved / max(1.0, self.moved_whole + self.moved_cut),
            own.num_kernels,
        )


class _Tracer(OperatorMode):
    """Adds up operations by the layer that is running."""

    def __init__(self, tokens: int, hidden_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tokens, self.hidden_size = tokens, hidden_size
        self.layers: dict[int, _Layer] = {}
        self.current: _Layer | None = None
        self.depth_cut = 0  # inside what tensor parallelism divides
        self.side: Side = None  # of the product that is running: "in", "out" or None
        self.own: set[int] = set()
        self.mlp: _Mlp | None = None  # that is running
        self.mlp_inputs: set[int] = set()
        self.saved_outside = 0.0
        self._seen: dict[int, torch.Tensor] = {}
        # Made before the layers and used by all (rotary embeddings), so not any layer's own. Kept
        # alive, or their addresses would be reused.
        self._outside: list[torch.Tensor] = []
        self._shared: set[int] = set()

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
            made = list(tensors_in(result))
            self._outside += made
            self._shared.update(
                storage_of(t) for t in made if t.dim() and t.shape[-1] != self.hidden_size
            )
        return result

    def _count(self, func: Any, args: Any, result: Any) -> None:
        assert self.current is not None
        outputs, inputs = list(tensors_in(result)), list(tensors_in(args))
        storages = {storage_of(t) for t in inputs}
        name = func.name().partition("::")[2].partition(".")[0]
        if all(storage_of(t) in storages for t in outputs) and not name.endswith("_"):
            return  # a view
        self.current.num_kernels += 1
        if self.mlp is not None:
            self.mlp.num_kernels += 1
        if name in _PRODUCTS:
            self._product(name, inputs, outputs[0])
            if self.mlp is not None:
                last = self.current.matmuls[-1]
                self.mlp.products += last.in_size * last.out_size * last.share
            return
        size = sum(t.numel() * t.element_size() for t in (*inputs, *outputs))
        if self.mlp is not None:
            self.mlp.moved += size
        if self.depth_cut:
            self.current.moved_cut += size
        else:
            self.current.moved_whole += size

    def _product(self, name: str, inputs: list[torch.Tensor], output: torch.Tensor) -> None:
        assert self.current is not None
        weights = [t for t in inputs if storage_of(t) in self.own and t.dim() >= 2]
        if not weights:  # scores of an attention outside the registry, or a scan
            left = inputs[-2] if len(inputs) >= 2 else output
            share = output.numel() / output.shape[-1] / self.tokens
            cut: Side = "out" if self.depth_cut else None
            self.current.matmuls.append(Matmul(left.shape[-1], output.shape[-1], cut, 1, share))
            return
        weight, out_size = weights[0], output.shape[-1]
        rows = output.numel() // out_size
        groups = weight.shape[0] if weight.dim() == 3 else 1
        in_size = (
            next(n for n in weight.shape[-2:][::-1] if n != out_size)
            if (weight.shape[-1] != weight.shape[-2])
            else out_size
        )
        self.current.matmuls.append(
            Matmul(in_size, out_size, self.side, groups, rows / self.tokens)
        )

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Counts what autograd keeps, each storage once."""

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            key = storage_of(tensor)
            known = key in self.own or key in self._shared or key in self._seen
            if known:
                return tensor
            if self.current is None:
                if tensor.is_floating_point() and tensor.shape[-1:] == (self.hidden_size,):
                    self._seen[key] = tensor
                    self.saved_outside += tensor.untyped_storage().nbytes()
                return tensor
            self._seen[key] = tensor  # kept alive, or its address would be reused
            size = tensor.untyped_storage().nbytes()
            is_cut = bool(self.depth_cut) and self.side != "out"
            own = None if key in self.mlp_inputs else self.mlp
            for sums in (self.current, own):
                if sums is not None and is_cut:
                    sums.saved_cut += size
                elif sums is not None:
                    sums.saved_whole += size
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield


def trace_model(
    hf_config: PreTrainedConfig, dtype: torch.dtype, sequence_length: int = 128
) -> ModelCosts:
    """Costs of the model that `hf_config` describes, trained in `dtype`. Takes a second or two, no
    memory and no device. Raises ModelError if transformers cannot run it on the meta device."""
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
    AttentionInterface.register(_NAME, functools.partial(_attend, tracer))
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
        ids = torch.zeros(1, sequence_length, dtype=torch.int64)
    model.tie_weights()  # what no_init_weights also skips
    model.train()
    count = getattr(text_config(config), "num_hidden_layers", None)
    layers = [layer for _, layer in listed_layers(model, count)]
    further = mtp_layers(model)
    layers += [] if further is None else further.layers
    tracer.own = {storage_of(p) for p in model.parameters()}
    with ExitStack() as stack:
        stack.enter_context(_watched(model, layers, tracer))
        stack.enter_context(document_boundaries(packed=False))
        stack.enter_context(tracer.saving())
        stack.enter_context(tracer)
        if further is not None:
            stack.enter_context(_followed_by(model, further, ids))
        model(input_ids=ids, use_cache=False)
    return _collected(model, layers, tracer, sequence_length, dtype)


@contextmanager
def _followed_by(
    model: PreTrainedModel, further: MultiTokenLayers, ids: torch.Tensor
) -> Iterator[None]:
    """Run the layers for multi-token prediction after the model's own inside."""

    def run(_module: nn.Module, _inputs: object, outputs: Any) -> None:
        for _ in further.hidden_states(model, outputs.last_hidden_state, ids, None):
            pass

    with model.get_decoder().register_forward_hook(run):
        yield


def _attend(
    tracer: _Tracer,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention for transformers instead of a kernel: [batch, heads, tokens, size] each."""
    if tracer.current is not None:
        window = options.get("sliding_window")
        tracer.current.attention = Attention(
            query.shape[1], key.shape[1], query.shape[-1], value.shape[-1], window
        )
    output: torch.Tensor = _FusedAttention.apply(query, key, value)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2).contiguous(), None


@contextmanager
def _watched(model: PreTrainedModel, layers: list[nn.Module], tracer: _Tracer) -> Iterator[None]:
    """Hook the layers: the tracer follows which one runs, and what tensor parallelism divides."""

    def begin(index: int, *_: Any) -> None:
        tracer.current, tracer.depth_cut = tracer.layers.setdefault(index, _Layer()), 0

    def same(index: int, first: int) -> None:
        tracer.layers[index] = tracer.layers[first]

    with ExitStack() as hooks:
        for index, layer in enumerate(layers):
            begins = functools.partial(begin, index)
            hooks.enter_context(layer.register_forward_pre_hook(begins))
            hooks.enter_context(layer.register_forward_hook(_sets(tracer, current=None)))
        for handle in (*_mlp_hooks(model, tracer), *_cut_hooks(model, tracer)):
            hooks.enter_context(handle)
        hooks.enter_context(run_once(layers, same))
        yield


def _mlp_hooks(model: PreTrainedModel, tracer: _Tracer) -> Iterator[Any]:
    """Hook the MLPs that can be computed in tiles."""
    stacked = {name for name, entry in parameter_roles(model).items() if entry.is_stacked}

    def begin(size: int, of_experts: bool, _: nn.Module, args: Any, kwargs: Any) -> None:
        if tracer.current is None:
            return
        own = tracer.mlp = tracer.current.mlp
        tracer.mlp_inputs = {storage_of(t) for t in tensors_in((*args, *kwargs.values()))}
        if of_experts:
            own.largest_expert = max(own.largest_expert, size)
        else:
            own.largest = max(own.largest, size)

    for name in find_mlps(model):
        module = model.get_submodule(name)
        size = sum(parameter.numel() for parameter in module.parameters())
        begins = functools.partial(begin, size, any(n.startswith(f"{name}.") for n in stacked))
        yield module.register_forward_pre_hook(begins, with_kwargs=True)
        yield module.register_forward_hook(_sets(tracer, mlp=None))


def _cut_hooks(model: PreTrainedModel, tracer: _Tracer) -> Iterator[Any]:
    plan = known_plan(model)
    experts = set(modules_of_experts(model))
    opens = _sets(tracer, side=None, depth_cut=1)
    closes = _sets(tracer, side=None, depth_cut=0)
    for name, module in model.named_modules():
        style = plan.get(name, "")
        if style in ("colwise", "packed_colwise"):
            yield module.register_forward_pre_hook(_sets(tracer, side="out"))
            yield module.register_forward_hook(opens)
        elif style in ("rowwise", "packed_rowwise"):
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
    plan = known_plan(model)
    names = {module: name for name, module in model.named_modules()}
    stacked = {name for name, entry in parameter_roles(model).items() if entry.is_stacked}
    kinds: list[LayerCosts] = []
    order: list[int] = []
    for index, layer in enumerate(layers):
        seen = tracer.layers.get(index, _Layer())
        layer_trace = replace(seen, parameters=_parameters(names[layer], layer, plan, stacked))
        costs = layer_trace.costs(tokens)
        if costs not in kinds:
            kinds.append(costs)
        order.append(kinds.index(costs))
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is embedding
    inner = sum(kinds[kind].num_parameters for kind in order)
    total = sum(p.numel() for p in model.parameters())
    head_parameters = 0 if tied or head is None else head.weight.numel()
    return ModelCosts(
        hidden_size=int(text_config(model.config).hidden_size),
        vocabulary_size=int(embedding.shape[0]),
        kinds=tuple(kinds),
        layers=tuple(order),
        tied=tied,
        embedding_parameters=embedding.numel(),
        head_parameters=head_parameters,
        num_other_parameters=total - inner - embedding.numel() - head_parameters,
        source="traced",
        element_bytes=dtype.itemsize,
        saved_bytes_outside=tracer.saved_outside / tokens,
        num_further_losses=num_trained_mtp_layers(model.config),
    )


def _parameters(
    prefix: str, layer: nn.Module, plan: dict[str, str], stacked: Container[str]
) -> tuple[int, int, int, int]:
    """Count elements that all tensor-parallel ranks have, that they divide, and of `stacked`
    experts; and the tensors."""
    whole = cut = expert = count = 0
    for name, parameter in layer.named_parameters():
        count += 1
        full = f"{prefix}.{name}"
        style = plan.get(full) or plan.get(full.rpartition(".")[0], "")
        if full in stacked:
            expert += parameter.numel()
        elif "colwise" in style or "rowwise" in style:
            cut += parameter.numel()
        else:
            whole += parameter.numel()
    return whole, cut, expert, count


_OF_PLACE = {"layer_idx", "layer_id", "layer_index", "layer_number", "block_idx", "idx"}
"""Attributes by which modules know where in the model they are."""


@contextmanager
def run_once(layers: Sequence[nn.Module], same: Callable[[int, int], None]) -> Iterator[None]:
    """Inside, a layer that equals one that has run returns that one's outputs; `same` is called
    with both indices."""
    outputs: dict[Hashable, tuple[int, Any]] = {}

    def once(index: int, layer: nn.Module) -> Callable[..., Any]:
        own, built = layer.forward, _built(layer)

        def forward(*args: Any, **kwargs: Any) -> Any:
            key = (built, _called(args), _called(kwargs))
            if key in outputs:
                first, output = outputs[key]
                same(index, first)
                return output
            output = own(*args, **kwargs)
            outputs[key] = (index, output)
            return output

        return forward

    for index, layer in enumerate(layers):
        shadow(layer, "forward", once(index, layer))
    try:
        yield
    finally:
        for layer in layers:
            unshadow(layer, "forward")


def _built(layer: nn.Module) -> Hashable:
    """Return a layer's classes and numbers of modules, and its parameters' shapes."""
    modules = tuple(
        (
            name,
            type(module),
            tuple(
                (key, value)
                for key, value in vars(module).items()
                if key not in _OF_PLACE and _is_plain(value)
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


def _called(value: Any) -> Hashable:
    """Return shapes of tensors, plain values, and types of all else in a layer's arguments."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    if isinstance(value, tuple | list):
        return tuple(_called(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _called(item)) for key, item in value.items())
    if _is_plain(value):
        plain: Hashable = value
        return plain
    return "of type", f"{type(value)}"
