"""One pipeline stage of any Hugging Face model with a causal LM head or a score head: the full
model with most layers replaced.

A replacement of the layer before the stage's first layer returns the payload of the previous stage,
and a replacement of the layer after the stage's last layer ends the forward pass with the payload
for the next stage. So names, indices, masks, rotary embeddings, multipliers and the head are
unchanged. Parameters outside the layers that a stage does not need are zeros without memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import UserDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from bigtrain.errors import ModelError
from bigtrain.models.experts import recorded
from bigtrain.models.layers.adapter_names import weight_of
from bigtrain.models.layers.parameters import (
    give_properties,
    has_score_head,
    names_of,
    parameter_of,
)
from bigtrain.models.parallel.stage_layout import Handover, StageLayout, map_tensors
from bigtrain.models.transformers_patches import mark_initialized


@dataclass(frozen=True)
class Payload:
    """Message of a stage to the next. outputs: of the stage's last layer. shared: dicts that layers
    write, by the name of the layers' argument. router_logits: of the layers so far, stacked, if the
    model computes a loss from them."""

    outputs: tuple[Any, ...]
    shared: dict[str, dict[Any, Any]]
    router_logits: torch.Tensor | None = None

    def map(self, function: Callable[[torch.Tensor], Any]) -> Payload:
        """Return the payload with `function` applied to every tensor, in a fixed order."""
        return Payload(*map_tensors(function, (self.outputs, self.shared, self.router_logits)))


class LayerPlaceholder(nn.Module):
    """Replaces a layer of another stage. Has the plain attributes of the layer and of the layer's
    class. absent: if set, the value of every other attribute, such as the layer's modules and
    parameters (`bigtrain.models.build.initialize_weights`)."""

    is_placeholder = True

    def __init__(self, layer: nn.Module, handover: Handover | None) -> None:
        super().__init__()
        self.__dict__["_stands_for"] = type(layer)
        self._handover = handover
        for name, value in vars(layer).items():
            if name.startswith("_") or name == "forward":
                continue
            if isinstance(value, (torch.Tensor, nn.Module)):
                continue
            self.__dict__.setdefault(name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            value = getattr(self.__dict__["_stands_for"], name, None)
            if isinstance(value, property) and value.fget is not None:
                return value.fget(self)
            if value is None or callable(value):
                if (absent := self.__dict__.get("absent")) is not None:
                    return absent
                raise
            return value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first argument, in the form of the layer's outputs; its values are unused."""
        hidden = args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values())))
        num_outputs = self._handover.num_outputs if self._handover is not None else 0
        # 0 outputs: the layer returns a tensor, not a tuple.
        return (hidden,) + (None,) * (num_outputs - 1) if num_outputs else hidden


class StageInput(LayerPlaceholder):
    """Replaces the layer before a stage's first layer: returns the outputs in `received`, the
    payload of the previous stage."""

    received: Payload | None = None

    def forward(self, *_: Any, **kwargs: Any) -> Any:
        assert self.received is not None
        assert self._handover is not None
        for key, values in self.received.shared.items():
            kwargs[key].update(values)
        routers = recorded()
        if routers is not None and self.received.router_logits is not None:
            routers.extend(self.received.router_logits)
        outputs = self.received.outputs
        return outputs if self._handover.num_outputs else outputs[0]  # 0: a tensor, not a tuple


class _StageEnd(Exception):
    """Ends the model's forward pass after a stage's last layer."""

    def __init__(self, payload: Payload) -> None:
        self.payload = payload


class StageOutput(LayerPlaceholder):
    """Replaces the layer after a stage's last layer: ends the forward pass with a payload made of
    the layer's arguments. previous: how the stage's last layer passes outputs to this layer.
    shared: names of the arguments that are dicts which layers write."""

    def __init__(self, layer: nn.Module, previous: Handover, shared: frozenset[str]) -> None:
        super().__init__(layer, None)
        self._previous = previous
        self._shared = shared

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        def argument(position_or_name: int | str | None) -> Any:
            if position_or_name is None:  # an output that this layer does not get
                return None
            if isinstance(position_or_name, int):
                return args[position_or_name]
            return kwargs[position_or_name]

        shared = {
            key: dict(value)
            for key, value in kwargs.items()
            if key in self._shared and isinstance(value, (dict, UserDict))
        }
        outputs = tuple(argument(route) for route in self._previous.routes)
        routers = recorded()
        # One tensor, since every tensor is a message.
        raise _StageEnd(Payload(outputs, shared, torch.stack(routers) if routers else None))


class Stage(nn.Module):
    """Stage `index` of a model split at `cuts`. The full model is split in place and stored in
    `model`. cuts: ascending layer indices from 0 to the number of layers; stage i has layers
    ``cuts[i] : cuts[i + 1]``. Parameters keep their names in the model."""

    def __init__(
        self, model: PreTrainedModel, layout: StageLayout, cuts: Sequence[int], index: int
    ) -> None:
        super().__init__()
        self.index = index
        self.is_first, self.is_last = index == 0, index == len(cuts) - 2
        # A score head looks for the last token of every row. Without tokens, a stage computes from
        # embeddings of zeros.
        needs_row_ends = self.is_last and has_score_head(model)
        self.needs_tokens = self.is_first or needs_row_ends or layout.tokens_everywhere
        # Gradients of parameters on more than one stage must be summed.
        stages_by_name = stages_of_parameters(model, layout, cuts)
        self.stages_by_shared_name = {
            name: stages for name, stages in stages_by_name.items() if len(stages) > 1
        }
        for name, parameter in model.named_parameters():
            # Weights in 4 bits are integers.
            if not parameter.is_floating_point() and not name.startswith(f"{layout.layers}."):
                raise ModelError(
                    f"adapters.quantization: {name} is outside of the layers that stages divide, "
                    "and no placeholder exists for a weight in 4 bits on the other stages -> "
                    "parallel.pipeline=1, or adapters.quantization=none"
                )
        # The width is read before the embedding is removed.
        embedding = model.get_input_embeddings()
        width = getattr(embedding, "embedding_dim", None)
        self._width = int(width or model.config.get_text_config().hidden_size)
        kept_names = {name for name, stages in stages_by_name.items() if index in stages}
        # Layers of other stages become placeholders; the stage's edges receive and return payloads.
        layers: Any = model.get_submodule(layout.layers)
        start, stop = cuts[index], cuts[index + 1]
        assert len(layers) == layout.num_layers
        assert 0 <= start < stop <= len(layers)
        self._entry: StageInput | None = None
        for number, layer in enumerate(layers):
            handover = layout.handovers[number] if number < len(layout.handovers) else None
            if start <= number < stop:
                continue
            if number == start - 1:
                layers[number] = self._entry = StageInput(layer, handover)
            elif number == stop:
                layers[number] = StageOutput(layer, layout.handovers[stop - 1], layout.shared)
            else:
                layers[number] = LayerPlaceholder(layer, handover)
        _remove_other_parameters(model, kept_names)
        self.model = model

    def forward(
        self,
        payload: Payload | None,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        **loss: Any,
    ) -> Any:
        """Return the next stage's input (a Payload), or the last stage's ModelOutput. `payload` is
        None on the first stage. Without `needs_tokens` only the shape of `input_ids` [B, T] is
        used. `loss`, on the last stage: arguments of a `ChunkedLoss`."""
        inputs: dict[str, Any] = {"use_cache": False, **loss}
        if position_ids is not None:
            inputs["position_ids"] = position_ids
        if self.needs_tokens:
            inputs["input_ids"] = input_ids
        else:
            parameter = next(p for p in self.model.parameters() if p.is_floating_point())
            inputs["inputs_embeds"] = parameter.new_zeros(*input_ids.shape, self._width)
        if self._entry is not None:
            self._entry.received = payload
        try:
            return self.model(**inputs)
        except _StageEnd as stop:
            return stop.payload
        finally:
            if self._entry is not None:
                self._entry.received = None


def stages_of_parameters(
    model: PreTrainedModel, layout: StageLayout, cuts: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """Return the stages that hold each parameter of the full model, by its first name, ascending.
    Raises ModelError if layers of different stages share parameters."""
    last = len(cuts) - 2
    stages_by_name: dict[str, tuple[int, ...]] = {}
    prefix = f"{layout.layers}."
    for names in names_of(model.named_parameters(remove_duplicate=False)).values():
        parameter = parameter_of(model, names[0])
        layer_paths = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        layer_indices = {int(path.split(".")[0]) for path in layer_paths}
        stages = {bisect_right(cuts, layer_index) - 1 for layer_index in layer_indices}
        if len(stages) > 1:
            raise ModelError(f"layers of different stages share the parameter {names[0]}")
        weight_name = weight_of(names[0])  # the layout is of the model without adapters
        if weight_name in layout.prologue:
            stages |= set(range(last + 1)) if layout.tokens_everywhere else {0}
        if weight_name in layout.epilogue:
            stages.add(last)
        if not parameter.requires_grad and not stages:
            # The layout comes from gradients, so it lacks frozen parameters: any stage may need it.
            stages = set(range(last + 1))
        # A parameter that nothing depends on is on the first stage, to be saved.
        stages_by_name[names[0]] = tuple(sorted(stages or {0}))
    return stages_by_name


def _remove_other_parameters(model: PreTrainedModel, kept_names: set[str]) -> None:
    """Replace every parameter whose first name is not in `kept_names` by zeros without memory, so
    that the parameter's module stays callable."""
    first_names = {
        name: names[0]
        for names in names_of(model.named_parameters(remove_duplicate=False)).values()
        for name in names
    }
    # The zeros (one stored element) have the dtype and device that a parameter of the stage has
    # when the property is read.
    kept_parameter = next(
        parameter
        for name, parameter in model.named_parameters()
        if name in kept_names and parameter.is_floating_point()
    )

    def zeros_property(shape: torch.Size) -> property:
        def zeros(_: nn.Module) -> torch.Tensor:
            zero = torch.zeros((), dtype=kept_parameter.dtype, device=kept_parameter.device)
            tensor = zero.expand(shape)
            mark_initialized(tensor)
            return tensor

        return property(zeros)

    for prefix, module in list(model.named_modules()):
        removed = {
            name: parameter
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
            if first_names[f"{prefix}.{name}" if prefix else name] not in kept_names
        }
        if removed:
            for name in removed:
                delattr(module, name)
            properties = {name: zeros_property(p.shape) for name, p in removed.items()}
            give_properties(module, properties, is_hollow=True)
