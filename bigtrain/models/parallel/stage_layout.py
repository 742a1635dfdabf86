"""Layout of pipeline stages, observed in one forward pass of a proxy model. No class declares which
outputs a layer passes to the next layer, which further inputs layers get, and which parameters are
used before and after the layers (``base_model_pp_plan`` names modules, for half of the
architectures)."""

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
"""Position or keyword of an argument in a layer's call."""


@dataclass(frozen=True)
class Handover:
    """Outputs of a layer, and the next layer's arguments that receive them. num_outputs: length of
    the layer's tuple of outputs; 0 if the layer returns a bare tensor. routes: for each output, the
    argument of the next layer's call that receives the output; None if there is none."""

    num_outputs: int
    routes: tuple[ArgumentKey | None, ...]


@dataclass(frozen=True)
class StageLayout:
    """Split points of an architecture, and its data between stages.

    layers: name of the module list. handovers: one for each layer but the last. shared: keywords of
    dicts that layers write and later layers read. tokens_everywhere: whether every stage needs the
    token ids, because layers get further inputs that are computed from token ids. prologue: names
    of parameters outside the layers that are used before the first layer (or, with
    tokens_everywhere, before any layer). epilogue: names of parameters that are used after the last
    layer. Tied parameters are in both.
    """

    layers: str
    num_layers: int
    handovers: tuple[Handover, ...]
    shared: frozenset[str]
    tokens_everywhere: bool
    prologue: frozenset[str]
    epilogue: frozenset[str]


def find_layout(model: PreTrainedModel, input_ids: torch.Tensor) -> StageLayout:
    """Return the layout of `model`, a proxy model that stays unchanged, from a forward pass of
    `input_ids` [samples, tokens]. Raises ModelError if the model cannot be split."""
    name = _layer_list(model, input_ids)
    layers = list(model.get_submodule(name).children())
    calls, logits = _record_calls(model, layers, input_ids)
    handovers = tuple(_handover(calls, index) for index in range(len(layers) - 1))

    # Layers must not depend on layers before the previous one, other than by its outputs.
    earlier_parameters: list[nn.Parameter] = []
    for index, layer in enumerate(layers):
        further_inputs = _further_inputs(calls, index) if index > 0 else ()
        for tensor in further_inputs:
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
    all_further_inputs = [
        tensor for index in range(1, len(calls)) for tensor in _further_inputs(calls, index)
    ]
    # Further inputs come from token ids if they depend on parameters, or are the ids themselves.
    differentiable = [tensor for tensor in all_further_inputs if tensor.requires_grad]
    tokens_everywhere = bool(differentiable) or any(
        tensor.shape == input_ids.shape
        and not tensor.is_floating_point()
        and bool((tensor == input_ids).all())
        for tensor in all_further_inputs
    )
    return StageLayout(
        layers=name,
        num_layers=len(layers),
        handovers=handovers,
        shared=frozenset(key for call in calls for key in call.written),
        tokens_everywhere=tokens_everywhere,
        prologue=_influential_names([*entering, *differentiable], outside_parameters),
        epilogue=_influential_names([logits], outside_parameters),
    )


@dataclass
class _Call:
    """One layer's call. shared: entries before the call of the dicts among the arguments, by
    keyword. written: keywords of the dicts that the call changed."""

    arguments: dict[ArgumentKey, Any]
    shared: dict[str, dict[Any, Any]]
    outputs: Any = None
    written: set[str] = field(default_factory=set)


def _layer_list(model: PreTrainedModel, input_ids: torch.Tensor) -> str:
    """Return the name of the module list whose members a forward pass calls once and in order: a
    list of the pipeline plan, or else the list with most parameters. Raises ModelError if there is
    none."""
    lists = {
        name: list(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module)
    }
    called_indices: dict[str, list[int]] = {name: [] for name in lists}

    def record(name: str, index: int, *_: Any) -> None:
        called_indices[name].append(index)

    with ExitStack() as hooks, torch.no_grad():
        for name, members in lists.items():
            for index, member in enumerate(members):
                hooks.enter_context(member.register_forward_pre_hook(partial(record, name, index)))
        model(input_ids=input_ids, use_cache=False)

    # Keep the lists whose members were all called once, in their order.
    fitting = [n for n, members in lists.items() if called_indices[n] == [*range(len(members))]]
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


def _record_calls(
    model: PreTrainedModel, layers: list[nn.Module], input_ids: torch.Tensor
) -> tuple[list[_Call], torch.Tensor]:
    """Return the layers' calls in a forward pass, and the logits, detached from the layers."""
    calls: list[_Call] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments: dict[ArgumentKey, Any] = dict(enumerate(args))
        arguments.update(kwargs)
        shared = {k: dict(v) for k, v in kwargs.items() if isinstance(v, (dict, UserDict))}
        calls.append(_Call(arguments, shared))

    def after(layer: nn.Module, _: Any, outputs: Any) -> Any:
        call = calls[-1]
        call.outputs = outputs
        for keyword, entries in call.shared.items():
            after_call = call.arguments[keyword]
            if after_call.keys() != entries.keys() or any(
                after_call[key] is not entries[key] for key in entries
            ):
                call.written.add(keyword)
        return _detached(outputs) if layer is layers[-1] else None  # None: outputs stay

    with ExitStack() as hooks, torch.enable_grad():
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(before, with_kwargs=True))
            hooks.enter_context(layer.register_forward_hook(after))
        logits = model(input_ids=input_ids, use_cache=False).logits
    return calls, logits


def _detached(outputs: Any) -> Any:
    """Return a layer's `outputs` with tensors detached from the graph."""
    if torch.is_tensor(outputs):
        return outputs.detach()
    if isinstance(outputs, (tuple, list)):
        return type(outputs)(_detached(x) for x in outputs)
    return outputs


def _handover(calls: list[_Call], index: int) -> Handover:
    """Return how layer `index` passes outputs to the next layer. Raises ModelError if the next
    layer does not get the first output."""
    outputs, next_arguments = calls[index].outputs, calls[index + 1].arguments
    is_sequence = isinstance(outputs, (tuple, list))
    output_values = outputs if is_sequence else (outputs,)

    def route(output: Any) -> ArgumentKey | None:
        if output is None:
            return None
        return next((key for key, value in next_arguments.items() if value is output), None)

    routes = tuple(map(route, output_values))
    if routes[0] is None:
        raise ModelError(
            f"what layer {index} returns is changed before layer {index + 1} is given it"
        )
    return Handover(len(output_values) if is_sequence else 0, routes)


def _further_inputs(calls: list[_Call], index: int) -> Iterator[torch.Tensor]:
    """Yield the tensors that layer `index` gets, except outputs of the previous layer and tensors
    in dicts that layers write."""
    output_ids = {id(tensor) for tensor in tensors_in(calls[index - 1].outputs)}
    written = set().union(*(call.written for call in calls))
    for argument_key, value in calls[index].arguments.items():
        if argument_key not in written:
            yield from (tensor for tensor in tensors_in(value) if id(tensor) not in output_ids)


def _influential_names(
    tensors: list[torch.Tensor], outside_parameters: dict[str, nn.Parameter]
) -> frozenset[str]:
    """Return the names of the parameters on which `tensors` depend."""
    gradients = _gradients(tensors, list(outside_parameters.values()))
    return frozenset(
        name
        for name, gradient in zip(outside_parameters, gradients, strict=True)
        if gradient is not None
    )


def _gradients(
    tensors: list[torch.Tensor], parameters: list[nn.Parameter]
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of the sum of `tensors` by `parameters`; None without a dependence."""
    sums = [tensor.sum() for tensor in tensors if tensor.requires_grad and tensor.numel()]
    if not sums or not parameters:
        return (None,) * len(parameters)
    return torch.autograd.grad(sums, parameters, allow_unused=True, retain_graph=True)


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
