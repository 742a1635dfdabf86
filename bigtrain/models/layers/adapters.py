"""LoRA adapters on the layers of a model: peft's modules, injected in place.

Importing peft takes seconds, so only runs with adapters do it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from bigtrain.models.layers.adapter_names import ADAPTER, parameter_layers
from bigtrain.models.layers.adapter_targets import find_parameters, find_saved, find_targets
from bigtrain.models.layers.parameters import has_score_head, local_shape
from bigtrain.models.layers.principal_adapters import add_initial_values
from bigtrain.models.torch_patches import shadow, shadowed
from bigtrain.models.transformers_patches import (
    mark_initialized,
    only_errors,
    taken_for_experts,
    targets_as_named,
)
from bigtrain.settings.sections.adapters import AdaptersSection

if TYPE_CHECKING:
    from peft import LoraConfig

STACKS = "peft adds adapters to stacked weights"
"""Why a graph ends."""


@contextmanager
def quiet_bitsandbytes() -> Iterator[None]:
    """Inside, bitsandbytes is imported without its remark that a kernel could be downloaded for
    this CPU. peft imports it wherever it is installed."""
    with only_errors("bitsandbytes"):
        yield


def lora_config(model: PreTrainedModel, section: AdaptersSection) -> LoraConfig:
    """Return peft's configuration of the adapters of `model`, without the base's name."""
    with quiet_bitsandbytes():
        from peft import LoraConfig

    names = find_targets(model, section).names
    return LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        lora_dropout=section.dropout,
        use_rslora=section.rslora,
        use_dora=section.dora,
        modules_to_save=find_saved(model, section).names or None,
        target_modules=names,
        target_parameters=find_parameters(model, section).names or None,
        fan_in_fan_out=bool(names) and isinstance(model.get_submodule(names[0]), Conv1D),
        task_type="SEQ_CLS" if has_score_head(model) else "CAUSAL_LM",
    )


def file_config(model: PreTrainedModel, section: AdaptersSection) -> LoraConfig:
    """Return `lora_config` for peft's files: their reader converts the names of targets. A layer
    whose name peft treats as an expert's is written as its weight (``target_parameters``): to the
    same product of the same two matrices, but without dropout, which peft has none for then."""
    config: Any = lora_config(model, section)
    if expert_names := layers_taken_for_experts(model, config.target_modules):
        config.target_modules = [n for n in config.target_modules if n not in expert_names]
        config.target_parameters = [
            *(config.target_parameters or ()),
            *(f"{name}.weight" for name in expert_names),
        ]
        config.lora_dropout = 0.0
    if section.init == "pissa":
        # The matrices of `matrices_on_base` have twice the rank, and the product the same scale.
        config.r *= 2
        config.lora_alpha *= 2**0.5 if section.rslora else 2
    converted: LoraConfig = config
    return converted


def layers_taken_for_experts(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Return the layers among `names` that peft treats as experts, judging by names."""
    names = list(names)
    with quiet_bitsandbytes():
        leaf_names = taken_for_experts(model, {name.rpartition(".")[2] for name in names})
    return [name for name in names if name.rpartition(".")[2] in leaf_names]


@torch.no_grad()
def add_adapters(
    model: PreTrainedModel, section: AdaptersSection, seed_of: Callable[[str], int]
) -> None:
    """Inject adapters into the layers of `model`, in place, and freeze everything else.

    Their initial values are peft's, from a random stream per layer: `seed_of` the layer's name. So
    they do not depend on the model's device and dtype, nor on whether the base parameters are
    partitioned; the adapters' are full. `models.weights.quantized` fills initial values that are a
    function of the model's weights. Collective if the base parameters are partitioned and some are
    copied (`modules_to_save`).
    """
    from peft import inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), quiet_bitsandbytes():
        # About layers that peft supports in several ways, and Conv1D.
        warnings.simplefilter("ignore")
        config = lora_config(model, section)
        requested = {*(config.target_modules or ()), *(config.target_parameters or ())}
        targets = map(model.get_submodule, config.target_modules or ())
        with _zeros_for_weights(targets if section.dora else ()), targets_as_named():
            inject_adapter_in_model(config, model)
        lora_layers = [(n, m) for n, m in model.named_modules() if isinstance(m, LoraLayer)]

        # peft names the layer of a stacked weight after the module that holds the weight.
        stacks = parameter_layers(model)
        adapted = {name for name, _ in lora_layers} - {name for name, _ in stacks.values()}
        assert adapted | stacks.keys() == requested, "peft adapted other layers than requested"

        for name, layer in lora_layers:
            torch.manual_seed(seed_of(name))
            # Values drawn in float32 on the CPU are rounded into the tensors of the parameters.
            named_parameters = layer.named_parameters()
            parameters = [p for name, p in named_parameters if not name.startswith("base_layer.")]
            tensors = [parameter.data for parameter in parameters]
            for parameter, tensor in zip(parameters, tensors, strict=True):
                parameter.data = torch.ones(tensor.shape, dtype=torch.float32)
            layer.reset_lora_parameters(ADAPTER, True)
            if section.init == "pissa":  # whose values come with the base's weights
                add_initial_values(layer)
            for parameter, tensor in zip(parameters, tensors, strict=True):
                tensor.copy_(parameter.data)
                parameter.data = tensor
                mark_initialized(parameter)  # where the base weights are drawn afterwards


def keep_stacks_out_of_graphs(model: PreTrainedModel) -> bool:
    """Let compiled layers call stacks with adapters between two graphs, and return whether `model`
    has any. At each call peft makes the sum of weights and adapters a parameter of the stack's
    module, for which every layer would be compiled again, and again in later steps."""
    layers = parameter_layers(model)
    for name, layer in layers.values():
        if not name.endswith(".base_layer"):  # the outer one of a module with several stacks
            shadow(layer, "forward", torch.compiler.disable(layer.forward, reason=STACKS))
    return bool(layers)


@contextmanager
def _zeros_for_weights(layers: Iterable[Any]) -> Iterator[None]:
    """Show zeros for weights inside: peft computes DoRA's magnitudes, and the weights may be
    partitioned."""
    with ExitStack() as stack:
        for layer in layers:
            weight = layer.weight
            if type(weight) is nn.Parameter:  # not a weight in 4 bits
                zeros = weight.new_zeros(()).expand(local_shape(weight))
                stack.enter_context(shadowed(layer, {"weight": zeros}))
        yield
