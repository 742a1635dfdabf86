"""Layout of pipeline stages, observed in one forward pass of a proxy model. No class declares what
one layer passes to the next, what else layers get, and which parameters come before and after them
(``base_model_pp_plan`` names modules, for half of the architectures)."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from bigtrain.errors import ModelError

Place = int | str
"""An argument of a layer's call: its position, or its keyword."""


@dataclass(frozen=True)
class Handover:
    """Outputs of a layer, and where the next layer receives them. num_outputs: 0 if the layer
    returns a bare tensor, else the length of its tuple. routes: for each output, its position in
    the next layer's call; None if it is not passed on."""

    num_outputs: int
    routes: tuple[Place | None, ...]


@dataclass(frozen=True)
class StageLayout:
    """Split points of an architecture, and its data between stages.

    layers: name of the module list. handovers: one for each layer but the last. shared: keywords
    of dicts that layers write and later layers read. tokens_everywhere: whether every stage needs
    the token ids, because layers get more than the previous layer's output, computed from
    them. prologue, epilogue: names of parameters outside the layers that are needed before the
    first one (or, with tokens_everywhere, before any), and after the last one; tied ones are both.
    """

    layers: str
    num_layers: int
    handovers: tuple[Handover, ...]
    shared: frozenset[str]
    tokens_everywhere: bool
    prologue: frozenset[str]
    epilogue: frozenset[str]


def find_layout(model: PreTrainedModel, input_ids: torch.Tensor) -> StageLayout:
    """Return the layout of `model`, from a forward pass of `input_ids` [samples, tokens]. The model
    is left as it was; pass a proxy model. Raises ModelError if it cannot be split."""
    name = _layer_list(model, input_ids)
    layers = list(model.get_submodule(name).children())
    calls, logits = _watch(model, layers, input_ids)
    handovers = tuple(_handover(calls, index) for index in range(len(layers) - 1))
    outside = _parameters_outside(model, name)
    entering = [tensor for tensor in tensors_in(calls[0].arguments) if tensor.requires_grad]
    beside = [tensor for index in range(1, len(calls)) for tensor in _beside(calls, index)]
    differentiable = [tensor for tensor in beside if tensor.requires_grad]
    _refuse_hidden_dependence(layers, calls)
    return StageLayout(
        layers=name,
        num_layers=len(layers),
        handovers=handovers,
        shared=frozenset(key for call in calls for key in call.written),
        tokens_everywhere=bool(differentiable) or any(_is(t, input_ids) for t in beside),
        prologue=_dependencies([*entering, *differentiable], outside),
        epilogue=_dependencies([logits], outside),
    )


@dataclass
class _Call:
    """One layer's call. `shared`: what each dict among the arguments held when it was made."""

    arguments: dict[Place, Any]
    shared: dict[str, dict[Any, Any]]
    outputs: Any = None
    written: set[str] = field(default_factory=set)


def _layer_list(model: PreTrainedModel, input_ids: torch.Tensor) -> str:
    """Return the module list whose members a forward pass calls once each, in order: one of the
    pipeline plan, else the one with most parameters."""
    lists = {
        name: list(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module)
    }
    order: dict[str, list[int]] = {name: [] for name in lists}
    with ExitStack() as hooks, torch.no_grad():
        for name, members in lists.items():
            for index, member in enumerate(members):
                note = partial(_note, order[name], index)
                hooks.enter_context(member.register_forward_pre_hook(note))
        model(input_ids=input_ids, use_cache=False)
    fitting = [name for name, members in lists.items() if order[name] == list(range(len(members)))]
    planned = set[str](getattr(model.config, "base_model_pp_plan", None) or {})
    if not fitting:
        raise ModelError(
            "it has no list of layers that a forward pass calls once each, one after the other"
        )

    def preference(name: str) -> tuple[bool, int]:
        size = sum(p.numel() for member in lists[name] for p in member.parameters())
        return name.rpartition(".")[2] in planned, size

    chosen: str = max(fitting, key=preference)
    return chosen


def _note(order: list[int], index: int, *_: Any) -> None:
    order.append(index)


def _watch(
    model: PreTrainedModel, layers: list[nn.Module], input_ids: torch.Tensor
) -> tuple[list[_Call], torch.Tensor]:
    """Return the layers' calls in a forward pass, and its logits, detached from the layers."""
    calls: list[_Call] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments: dict[Place, Any] = dict(enumerate(args))
        arguments.update(kwargs)
        shared = {k: dict(v) for k, v in kwargs.items() if isinstance(v, (dict, UserDict))}
        calls.append(_Call(arguments, shared))

    def after(layer: nn.Module, _: Any, outputs: Any) -> Any:
        call = calls[-1]
        call.outputs = outputs
        for key, held in call.shared.items():
            now = call.arguments[key]
            if now.keys() != held.keys() or any(now[k] is not held[k] for k in held):
                call.written.add(key)
        return _detached(outputs) if layer is layers[-1] else None

    with ExitStack() as hooks, torch.enable_grad():
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(before, with_kwargs=True))
            hooks.enter_context(layer.register_forward_hook(after))
        logits = model(input_ids=input_ids, use_cache=False).logits
    return calls, logits


def _detached(outputs: Any) -> Any:
    if torch.is_tensor(outputs):
        return outputs.detach()
    return type(outputs)(_detached(x) for x in outputs) if _is_sequence(outputs) else outputs


def _handover(calls: list[_Call], index: int) -> Handover:
    outputs, following = calls[index].outputs, calls[index + 1].arguments
    parts = outputs if _is_sequence(outputs) else (outputs,)
    routes = tuple(
        next((place for place, value in following.items() if value is part), None)
        if part is not None
        else None
        for part in parts
    )
    if routes[0] is None:
        raise ModelError(
            f"what layer {index} returns is changed before layer {index + 1} is given it"
        )
    return Handover(len(parts) if _is_sequence(outputs) else 0, routes)


def _beside(calls: list[_Call], index: int) -> Iterator[torch.Tensor]:
    """Tensors that layer `index` gets and that no earlier layer passes on."""
    handed = {id(tensor) for tensor in tensors_in(calls[index - 1].outputs)}
    written = set().union(*(call.written for call in calls))
    for place, value in calls[index].arguments.items():
        if place not in written:
            yield from (tensor for tensor in tensors_in(value) if id(tensor) not in handed)


def _refuse_hidden_dependence(layers: list[nn.Module], calls: list[_Call]) -> None:
    """Refuse layers that get something computed from layers before the previous one."""
    earlier: list[nn.Parameter] = []
    for index, layer in enumerate(layers):
        if index:
            for tensor in _beside(calls, index):
                if tensor.requires_grad and _reaches([tensor], earlier):
                    raise ModelError(
                        f"layer {index} is given more of the layers before it than what layer "
                        f"{index - 1} returns"
                    )
        earlier += [p for p in layer.parameters() if p.requires_grad]


def _reaches(tensors: list[torch.Tensor], parameters: list[nn.Parameter]) -> bool:
    return any(gradient is not None for gradient in _gradients(tensors, parameters))


def _dependencies(tensors: list[torch.Tensor], outside: dict[str, nn.Parameter]) -> frozenset[str]:
    gradients = _gradients(tensors, list(outside.values()))
    return frozenset(
        name for name, gradient in zip(outside, gradients, strict=True) if gradient is not None
    )


def _gradients(
    tensors: list[torch.Tensor], parameters: list[nn.Parameter]
) -> tuple[torch.Tensor | None, ...]:
    total = [tensor.sum() for tensor in tensors if tensor.requires_grad and tensor.numel()]
    if not total or not parameters:
        return (None,) * len(parameters)
    return torch.autograd.grad(total, parameters, allow_unused=True, retain_graph=True)


def _parameters_outside(model: PreTrainedModel, layers: str) -> dict[str, nn.Parameter]:
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if not name.startswith(f"{layers}.") and parameter.requires_grad
    }


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in tuples, lists and dicts."""
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, (dict, UserDict)):
        yield from (tensor for item in value.values() for tensor in tensors_in(item))
    elif _is_sequence(value):
        yield from (tensor for item in value for tensor in tensors_in(item))


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """`value` with `function` applied to every tensor in its tuples, lists and dicts. Tensors are
    visited in a fixed order. Dicts of any kind become plain ones."""
    if torch.is_tensor(value):
        return function(value)
    if isinstance(value, (dict, UserDict)):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if _is_sequence(value):
        return tuple(map_tensors(function, item) for item in value)
    return value


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (tuple, list))


def _is(tensor: torch.Tensor, input_ids: torch.Tensor) -> bool:
    return (
        tensor.shape == input_ids.shape
        and not tensor.is_floating_point()
        and bool((tensor == input_ids).all())
    )


@dataclass(frozen=True)
class StagePlan:
    """Split of a model into stages that compute the same as the full model. cuts: layer indices,
    see `bigtrain.models.parallel.stages.Stage`."""

    layout: StageLayout
    cuts: tuple[int, ...]

    def describe(self, num_micro_batches: int) -> str:
        """Return the stages and their idle time (the pipeline bubble) as one human-readable
        line."""
        stages = [f"{start}-{stop - 1}" for start, stop in pairwise(self.cuts)]
        idle = (len(stages) - 1) / (num_micro_batches + len(stages) - 1)
        return (
            f"pipeline stages: layers {', '.join(stages)}; with {num_micro_batches} micro-batches "
            f"in a step they idle {idle:.0%} of the time (more accumulation is less)"
        )
