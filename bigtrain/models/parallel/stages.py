"""One pipeline stage of any Hugging Face model with a causal LM head or a score head: the full
model with most layers replaced.

The layer before the stage's first layer returns what the previous stage sent, and the layer after
its last layer ends the forward pass with what the next stage needs. So names, indices, masks,
rotary embeddings, multipliers and the head are unchanged. Parameters outside the layers that a
stage does not need are zeros without memory.
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
    """Message of a stage to the next: a layer's outputs, and the dicts that layers write.
    router_logits: of the layers so far, stacked, if the model's loss is computed from them."""

    outputs: tuple[Any, ...]
    shared: dict[str, dict[Any, Any]]
    router_logits: torch.Tensor | None = None

    def map(self, function: Callable[[torch.Tensor], Any]) -> Payload:
        """Return the payload with `function` applied to every tensor, in a fixed order."""
        return Payload(*map_tensors(function, (self.outputs, self.shared, self.router_logits)))


class LayerPlaceholder(nn.Module):
    """Replaces a layer of another stage. Has the plain attributes of the layer and the class.
    absent: what modules and parameters of the layer are, if set
    (`bigtrain.models.build.initialize_weights`)."""

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
        count = self._handover.num_outputs if self._handover is not None else 0
        return (hidden,) + (None,) * (count - 1) if count else hidden


class StageInput(LayerPlaceholder):
    """Replaces the layer before a stage's first layer: returns what the previous stage sent."""

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


class _Stop(Exception):
    def __init__(self, payload: Payload) -> None:
        self.payload = payload


class StageOutput(LayerPlaceholder):
    """Replaces the layer after a stage's last layer: ends the forward pass with its arguments."""

    def __init__(self, layer: nn.Module, previous: Handover, shared: frozenset[str]) -> None:
        super().__init__(layer, None)
        self._previous = previous
        self._shared = shared

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        def argument(argument_key: int | str | None) -> Any:
            if argument_key is None:
                return None
            return args[argument_key] if isinstance(argument_key, int) else kwargs[argument_key]

        shared = {
            key: dict(value)
            for key, value in kwargs.items()
            if key in self._shared and isinstance(value, (dict, UserDict))
        }
        outputs = tuple(argument(argument_key) for argument_key in self._previous.routes)
        routers = recorded()
        # One tensor, since every tensor is a message.
        raise _Stop(Payload(outputs, shared, torch.stack(routers) if routers else None))


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
        # A score head looks for the last token of every row; embeddings of other stages are zeros.
        finds_end = self.is_last and has_score_head(model)
        self.needs_tokens = self.is_first or finds_end or layout.tokens_everywhere
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
        # Read before the embedding is removed.
        embedding = model.get_input_embeddings()
        width = getattr(embedding, "embedding_dim", None)
        self._width = int(width or model.config.get_text_config().hidden_size)
        keep = {name for name, stages in stages_by_name.items() if index in stages}
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
        _hollow_out(model, keep)
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
        except _Stop as stop:
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
        layers = {int(n.removeprefix(prefix).split(".")[0]) for n in names if n.startswith(prefix)}
        stages = {bisect_right(cuts, layer) - 1 for layer in layers}
        if len(stages) > 1:
            raise ModelError(f"layers of different stages share the parameter {names[0]}")
        weight = weight_of(names[0])  # the layout is of the model without adapters
        if weight in layout.prologue:
            stages |= set(range(last + 1)) if layout.tokens_everywhere else {0}
        if weight in layout.epilogue:
            stages.add(last)
        if not parameter.requires_grad and not stages:
            stages = set(range(last + 1))  # frozen: found by no gradient
        # A parameter that nothing depends on is on the first stage, to be saved.
        stages_by_name[names[0]] = tuple(sorted(stages or {0}))
    return stages_by_name


def _hollow_out(model: PreTrainedModel, keep: set[str]) -> None:
    """Remove every parameter that is not in `keep`, by first name; its module stays callable."""
    first_name = {
        name: names[0]
        for names in names_of(model.named_parameters(remove_duplicate=False)).values()
        for name in names
    }
    # Properties return zeros (one stored element) in the dtype and on the device that `like`, a
    # parameter of the stage, has when the property is read.
    like = next(p for name, p in model.named_parameters() if name in keep and p.is_floating_point())

    def zeros_of(shape: torch.Size) -> Callable[[nn.Module], torch.Tensor]:
        def zeros(_: nn.Module) -> torch.Tensor:
            tensor = torch.zeros((), dtype=like.dtype, device=like.device).expand(shape)
            mark_initialized(tensor)
            return tensor

        return zeros

    for prefix, module in list(model.named_modules()):
        drop = {
            name: parameter
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
            if first_name[f"{prefix}.{name}" if prefix else name] not in keep
        }
        if drop:
            for name in drop:
                delattr(module, name)
            properties = {n: property(zeros_of(p.shape)) for n, p in drop.items()}
            give_properties(module, properties, is_hollow=True)
