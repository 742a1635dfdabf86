"""LoRA adapters that a model has: names of modules and parameters with and without adapters.

peft wraps a layer: its weight `q_proj.weight` becomes `q_proj.base_layer.weight`, and the trained
matrices are `q_proj.lora_A.default.weight` and `q_proj.lora_B.default.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

ADAPTER = "default"
"""peft's name of the adapter; a run has one."""
MAGNITUDE = f".lora_magnitude_vector.{ADAPTER}.weight"
"""End of the name of DoRA's magnitude vector."""

COPY = f".modules_to_save.{ADAPTER}."
_WRAPPERS = re.compile(r"(\.base_layer)+\.|\.original_module\.|" + re.escape(COPY))
_TRAINED = re.compile(rf"\.lora_[^.]+\.{ADAPTER}(\.|$)")


def base_name(name: str) -> str:
    """Return the name of a parameter or buffer in the model without adapters; also for trained
    copies."""
    return _WRAPPERS.sub(".", name)


def weight_of(name: str) -> str:
    """Return the base weight that parameter `name` is, or that its adapter is added to."""
    adapter = _TRAINED.search(name)
    return base_name(name) if adapter is None else f"{name[: adapter.start()]}.weight"


def adapted_weights(model: nn.Module) -> dict[str, str]:
    """Return the base weight that each parameter of `model` is, or that its adapter is added to, by
    the parameter's name."""
    # peft names the adapter of a stacked weight after the module that holds the weight.
    stacks: dict[str, str] = {}
    if has_adapters(model):
        stacks = {layer: weight for weight, (layer, _) in parameter_layers(model).items()}
    weights = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        adapter = _TRAINED.search(name)
        stack = None if adapter is None else stacks.get(name[: adapter.start()])
        weights[name] = stack or weight_of(name)
    return weights


def peft_name(name: str) -> str:
    """Return the name of an adapter's parameter in peft's files."""
    if name.endswith(MAGNITUDE):
        name = name.removesuffix(".weight") + "."
    return f"base_model.model.{name.replace(COPY, '.')}".replace(f".{ADAPTER}.", ".").rstrip(".")


def learns_faster(name: str, shape: Sequence[int]) -> bool:
    """Return whether LoRA+ updates the trained parameter `name` of this shape with its higher
    learning rate: matrices B and vectors, by peft's rule (0.21, optimizers/loraplus.py)."""
    return f".lora_B.{ADAPTER}." in name or len(shape) == 1


def has_adapters(model: nn.Module) -> bool:
    """Return whether `model` has adapters, and its base weights are frozen. True for every pipeline
    stage of a model with adapters, even a stage whose layers have none."""
    return hasattr(model, "peft_config")  # which peft sets when it injects adapters


def parameter_layers(model: nn.Module) -> dict[str, Any]:
    """Return, for each stacked weight with adapters, by its `base_name`: the name of peft's layer,
    and the layer."""
    from peft.tuners.lora.layer import ParamWrapper

    return {
        f"{base_name(f'{name}.')}{module.parameter_name}": (name, module)
        for name, module in model.named_modules()
        if isinstance(module, ParamWrapper)
    }


def borrowed_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """Yield layers that read parameters of other modules while they compute, with these parameters:
    peft's layer that adds an adapter to a stacked weight, DoRA's layer, and the layer with the
    stacked weight, from which peft takes the weight until the layer has computed."""
    from peft.tuners.lora.layer import LoraLayer, ParamWrapper

    def matrices(layer: Any) -> list[nn.Parameter]:
        return [layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight]

    for module in model.modules():
        layer: Any = module
        if isinstance(module, ParamWrapper):
            yield layer, [layer.get_param(), *matrices(layer)]
            yield layer.get_base_layer(), [layer.get_param()]
        elif isinstance(module, LoraLayer) and ADAPTER in layer.lora_magnitude_vector:
            base_parameters = layer.base_layer.parameters(recurse=False)
            yield layer.lora_magnitude_vector[ADAPTER], [*base_parameters, *matrices(layer)]


def trained_copy(module: Any) -> Any:
    """Return the trained copy of `module` (`modules_to_save`), which computes in its place, or
    `module`."""
    copies = getattr(module, "modules_to_save", None)
    return copies[ADAPTER] if isinstance(copies, nn.ModuleDict) else module


def computing_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return all modules by their names in the model without copies (`modules_to_save`); a trained
    copy replaces the module that it was copied from."""
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if ".original_module." not in f"{name}.":
            modules[f"{name}.".replace(COPY, ".").rstrip(".")] = module
    return modules


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Let LoRA adapters of `model` add nothing inside: they are scaled by 0. Not for DoRA, which
    changes the weight itself, nor for complete layers that are trained. Does nothing without
    adapters."""
    scalings: list[dict[str, float]] = []
    if has_adapters(model):
        from peft.tuners.lora import LoraLayer

        scalings = [module.scaling for module in model.modules() if isinstance(module, LoraLayer)]
    previous_scalings = [dict(scaling) for scaling in scalings]
    for scaling in scalings:
        scaling.update(dict.fromkeys(scaling, 0.0))
    try:
        yield
    finally:
        for scaling, values in zip(scalings, previous_scalings, strict=True):
            scaling.update(values)
