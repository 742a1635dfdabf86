"""Layout of pipeline stages, observed in one forward pass of a proxy model. No class declares what
one layer passes to the next, what else layers get, and which parameters come before and after the
layers (``base_model_pp_plan`` names modules, for half of the architectures)."""

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

ArgumentKey = int | str
"""An argument of a layer's call: its position, or its keyword."""


@dataclass(frozen=True)
class Handover:
    """Outputs of a layer, and the next layer's arguments that receive them. num_outputs: 0 if the
    layer returns a bare tensor, else the length of the tuple. routes: for each output, its position
    in the next layer's call; None if it is not passed on."""

    num_outputs: int
    routes: tuple[ArgumentKey | None, ...]


@dataclass(frozen=True)
class StageLayout:
    """Split points of an architecture, and its data between stages.

    layers: name of the module list. handovers: one for each layer but the last. shared: keywords
    of dicts that layers write and later layers read. tokens_everywhere: whether every stage needs
    the token ids, because layers get more than the previous layer's output, computed from token
    ids. prologue, epilogue: names of parameters outside the layers that are needed before the first
    layer (or, with tokens_everywhere, before any layer), and after the last one; tied parameters
    are in both.
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

    # Layers must not depend on layers before the previous one, other than by its outputs.
    earlier_parameters: list[nn.Parameter] = []
    for index, layer in enumerate(layers):
        tensors = _further_inputs(calls, index) if index > 0 else ()  # no layer is before the first
        for tensor in tensors:
            gradients = _gradients([tensor], earlier_parameters) if tensor.requires_grad else ()
            if any(gradient is not None for gradient in gradients):
                raise ModelError(
                    f"layer {index} is given more of the layers before it than what layer "
                    f"{index - 1} returns"
                )
        earlier_parameters += [p for p in layer.parameters() if p.requires_grad]

    # Parameters outside the layers are found by the gradients of what enters the layers.
    outside_parameters = {
        parameter_name: parameter
        for parameter_name, parameter in model.named_parameters()
        if not parameter_name.startswith(f"{name}.") and parameter.requires_grad
    }
    entering = [tensor for tensor in tensors_in(calls[0].arguments) if tensor.requires_grad]
    further_inputs = [
        tensor for index in range(1, len(calls)) for tensor in _further_inputs(calls, index)
    ]
    differentiable = [tensor for tensor in further_inputs if tensor.requires_grad]
    tokens_everywhere = bool(differentiable) or any(
        tensor.shape == input_ids.shape
        and not tensor.is_floating_point()
        and bool((tensor == input_ids).all())
        for tensor in further_inputs
    )
    return StageLayout(
        layers=name,
        num_layers=len(layers),
        handovers=handovers,
        shared=frozenset(key for call in calls for key in call.written),
        tokens_everywhere=tokens_everywhere,
        prologue=_dependencies([*entering, *differentiable], outside_parameters),
        epilogue=_dependencies([logits], outside_parameters),
    )


@dataclass
class _Call:
    """One layer's call. `shared`: entries of the dicts among the arguments before the call."""

    arguments: dict[ArgumentKey, Any]
    shared: dict[str, dict[Any, Any]]
    outputs: Any = None
    written: set[str] = field(default_factory=set)


def _layer_list(model: PreTrainedModel, input_ids: torch.Tensor) -> str:
    """Return the module list whose members a forward pass calls once and in order: a list of the
    pipeline plan, or else the list with most parameters."""
    lists = {
        name: list(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module)
    }
    order: dict[str, list[int]] = {name: [] for name in lists}
    with ExitStack() as hooks, torch.no_grad():
        for name, members in lists.items():
            for index, member in enumerate(members):
                record = partial(lambda calls, number, *_: calls.append(number), order[name], index)
                hooks.enter_context(member.register_forward_pre_hook(record))
        model(input_ids=input_ids, use_cache=False)

    # Lists whose members were all called once, in their order.
    fitting = [name for name, members in lists.items() if order[name] == list(range(len(members)))]
    planned = set[str](getattr(model.config, "base_model_pp_plan", None) or {})
    if not fitting:
        raise ModelError(
            "it has no list of layers that a forward pass calls once each, one after the other"
        )

    def preference(name: str) -> tuple[bool, int]:
        size = sum(p.numel() for member in lists[name] for p in member.parameters())
        return name.rpartition(".")[2] in planned, size

    layer_list: str = max(fitting, key=preference)
    return layer_list


def _watch(
    model: PreTrainedModel, layers: list[nn.Module], input_ids: torch.Tensor
) -> tuple[list[_Call], torch.Tensor]:
    """Return the layers' calls in a forward pass, and its logits, detached from the layers."""
    calls: list[_Call] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments: dict[ArgumentKey, Any] = dict(enumerate(args))
        arguments.update(kwargs)
        shared = {k: dict(v) for k, v in kwargs.items() if isinstance(v, (dict, UserDict))}
        calls.append(_Call(arguments, shared))

    def after(layer: nn.Module, _: Any, outputs: Any) -> Any:
        call = calls[-1]
        call.outputs = outputs
        for key, entries in call.shared.items():
            now = call.arguments[key]
            if now.keys() != entries.keys() or any(now[k] is not entries[k] for k in entries):
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
    if isinstance(outputs, (tuple, list)):
        return type(outputs)(_detached(x) for x in outputs)
    return outputs


def _handover(calls: list[_Call], index: int) -> Handover:
    outputs, following = calls[index].outputs, calls[index + 1].arguments
    is_sequence = isinstance(outputs, (tuple, list))
    parts = outputs if is_sequence else (outputs,)
    routes = tuple(
        next((argument_key for argument_key, value in following.items() if value is part), None)
        if part is not None
        else None
        for part in parts
    )
    if routes[0] is None:
        raise ModelError(
            f"what layer {index} returns is changed before layer {index + 1} is given it"
        )
    return Handover(len(parts) if is_sequence else 0, routes)


def _further_inputs(calls: list[_Call], index: int) -> Iterator[torch.Tensor]:
    """Yield the tensors that layer `index` gets and that the previous layer does not pass on."""
    handed = {id(tensor) for tensor in tensors_in(calls[index - 1].outputs)}
    written = set().union(*(call.written for call in calls))
    for argument_key, value in calls[index].arguments.items():
        if argument_key not in written:
            yield from (tensor for tensor in tensors_in(value) if id(tensor) not in handed)


def _dependencies(
    tensors: list[torch.Tensor], outside_parameters: dict[str, nn.Parameter]
) -> frozenset[str]:
    gradients = _gradients(tensors, list(outside_parameters.values()))
    return frozenset(
        name
        for name, gradient in zip(outside_parameters, gradients, strict=True)
        if gradient is not None
    )


def _gradients(
    tensors: list[torch.Tensor], parameters: list[nn.Parameter]
) -> tuple[torch.Tensor | None, ...]:
    total = [tensor.sum() for tensor in tensors if tensor.requires_grad and tensor.numel()]
    if not total or not parameters:
        return (None,) * len(parameters)
    return torch.autograd.grad(total, parameters, allow_unused=True, retain_graph=True)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in tuples, lists and dicts."""
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, (dict, UserDict)):
        yield from (tensor for item in value.values() for tensor in tensors_in(item))
    elif isinstance(value, (tuple, list)):
        yield from (tensor for item in value for tensor in tensors_in(item))


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return `value` with `function` applied to every tensor in tuples, lists and dicts. Tensors
    are visited in a fixed order. Lists become tuples, and dicts of any kind plain dicts."""
    if torch.is_tensor(value):
        return function(value)
    if isinstance(value, (dict, UserDict)):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(map_tensors(function, item) for item in value)
    return value


@dataclass(frozen=True)
class StagePlan:
    """Split of a model into stages that compute the full model's results. cuts: layer indices,
    see `bigtrain.models.parallel.stages.Stage`."""

    layout: StageLayout
    cuts: tuple[int, ...]

    def describe(self, num_micro_batches: int) -> str:
        """Return the stages and their idle time as one human-readable line. The pipeline bubble of
        p stages and m micro-batches is ``(p - 1) / (m + p - 1)`` (GPipe, arXiv 1811.06965)."""
        stages = [f"{start}-{stop - 1}" for start, stop in pairwise(self.cuts)]
        idle = (len(stages) - 1) / (num_micro_batches + len(stages) - 1)
        return (
            f"pipeline stages: layers {', '.join(stages)}; with {num_micro_batches} micro-batches "
            f"in a step they idle {idle:.0%} of the time (more accumulation is less)"
        )
