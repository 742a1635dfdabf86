"""LoRA adapters on the layers of a model: peft's own modules, injected in place.

peft wraps a layer: its weight `q_proj.weight` becomes `q_proj.base_layer.weight`, and the trained
matrices are `q_proj.lora_A.default.weight` and `q_proj.lora_B.default.weight`. Importing peft takes
seconds, so only runs with adapters do it.

The presets `attention` and `mlp` go by what modules are, not by their names. Attention is the
module that transformers records attention weights of; where an architecture declares none, a module
of a decoder layer that has heads (`head_dim`) and no convolution. The rest of a decoder layer is
its MLP, except for modules that mix tokens in another way (with a convolution, like Mamba's) and
routers.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from bigtrain.errors import Problem
from bigtrain.models.layers.parameters import (
    has_score_head,
    head_parameters,
    local_shape,
    names_of,
    output_layer,
)
from bigtrain.models.torch_patches import shadowed
from bigtrain.models.transformers_patches import (
    kept_in_float32,
    mark_initialized,
    only_errors,
    refused_by_peft,
    taken_for_experts,
    targets_as_named,
)
from bigtrain.settings.sections.adapters import PRESETS, AdaptersSection

if TYPE_CHECKING:
    from peft import LoraConfig
from torch.func import functional_call

from bigtrain.models.layers.parameter_roles import Role, parameter_roles
from bigtrain.models.layers.parameters import decoder_layers, parameter_of
from bigtrain.models.transformers_patches import attention_classes
from bigtrain.settings.sections.adapters import Preset

KEY = "adapters.targets"
SAVED_KEY = "adapters.modules_to_save"
PARAMETERS_KEY = "adapters.target_parameters"
QUANTIZED_KEY = "adapters.quantization"
ADAPTER = "default"
"""peft's name of the adapter; a run has one."""
MAGNITUDE = f".lora_magnitude_vector.{ADAPTER}.weight"
"""End of the name of DoRA's magnitude vector."""

COPY = f".modules_to_save.{ADAPTER}."
_OWN = re.compile(r"(\.base_layer)+\.|\.original_module\.|" + re.escape(COPY))
_TRAINED = re.compile(rf"\.lora_[^.]+\.{ADAPTER}(\.|$)")


def base_name(name: str) -> str:
    """Return the name of a parameter or buffer in the model without adapters; also for trained
    copies."""
    return _OWN.sub(".", name)


def weight_of(name: str) -> str:
    """Return the base weight that parameter `name` is, or that its adapter is added to."""
    adapter = _TRAINED.search(name)
    return base_name(name) if adapter is None else f"{name[: adapter.start()]}.weight"


def peft_name(name: str) -> str:
    """Return the name of an adapter's parameter in peft's files."""
    if name.endswith(MAGNITUDE):
        name = name.removesuffix(".weight") + "."
    return f"base_model.model.{name.replace(COPY, '.')}".replace(f".{ADAPTER}.", ".").rstrip(".")


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Let LoRA adapters of `model` add nothing inside: they are scaled by 0. Not for DoRA, which
    changes the weight itself, nor for complete layers that are trained. Does nothing without
    adapters."""
    scalings: list[dict[str, float]] = []
    if has_adapters(model):
        from peft.tuners.lora import LoraLayer

        scalings = [one.scaling for one in model.modules() if isinstance(one, LoraLayer)]
    kept = [dict(scaling) for scaling in scalings]
    for scaling in scalings:
        scaling.update(dict.fromkeys(scaling, 0.0))
    try:
        yield
    finally:
        for scaling, values in zip(scalings, kept, strict=True):
            scaling.update(values)


def has_adapters(model: nn.Module) -> bool:
    """Return whether `model` has adapters, and its own weights are frozen. True for every pipeline
    stage of such a model, even one whose layers have none."""
    return hasattr(model, "peft_config")  # which peft sets when it injects adapters


def find_targets(model: PreTrainedModel, section: AdaptersSection) -> tuple[list[str], list[str]]:
    """(names of the layers that get adapters, patterns that match none), in the model's order. Only
    linear layers, and never the head, whatever the patterns match."""
    head = output_layer(model)
    linear = [
        name for name, module in model.named_modules() if is_product(module) and module is not head
    ]
    if section.targets == "all-linear":
        return linear, []
    chosen: set[str] = set()
    empty: list[str] = []
    for preset in section.presets:
        layers = layers_of(model, preset)
        chosen.update(layers)
        if not layers and not stacks_of(model, preset):
            empty.append(preset)
    names, missing = _select(linear, section.patterns, chosen)
    return names, missing + empty


def find_parameters(
    model: PreTrainedModel, section: AdaptersSection
) -> tuple[list[str], list[str]]:
    """(names of the stacked weights that get adapters, patterns that match none)."""
    chosen = {name for preset in section.presets for name in stacks_of(model, preset)}
    return _select(stacked_weights(model), section.target_parameters, chosen)


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
    """Layers that read parameters which are not their own while they compute, each with those: of
    peft's the one that adds an adapter to a stacked weight, and DoRA's; and the layer with that
    weight, from which peft takes it until it has computed."""
    from peft.tuners.lora.layer import LoraLayer, ParamWrapper

    for module in model.modules():
        layer: Any = module
        if isinstance(module, ParamWrapper):
            yield layer, [layer.get_param(), *_matrices(layer)]
            yield layer.get_base_layer(), [layer.get_param()]
        elif isinstance(module, LoraLayer) and ADAPTER in layer.lora_magnitude_vector:
            own = layer.base_layer.parameters(recurse=False)
            yield layer.lora_magnitude_vector[ADAPTER], [*own, *_matrices(layer)]


def _matrices(layer: Any) -> list[nn.Parameter]:
    return [layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight]


def find_saved(model: PreTrainedModel, section: AdaptersSection) -> tuple[list[str], list[str]]:
    """(names of the modules in ``modules_to_save``, patterns that match none)."""
    own = [name for name, m in model.named_modules() if any(True for _ in m.parameters(False))]
    return _select(own, section.modules_to_save)


def trained_copy(module: Any) -> Any:
    """Return the trained copy of `module` (`modules_to_save`), which computes in its place, or
    itself."""
    copies = getattr(module, "modules_to_save", None)
    return copies[ADAPTER] if isinstance(copies, nn.ModuleDict) else module


def computing_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return all modules by the names they have in the model without copies (`modules_to_save`); of
    one that has a trained copy, that."""
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if ".original_module." not in f"{name}.":
            modules[f"{name}.".replace(COPY, ".").rstrip(".")] = module
    return modules


def _select(
    names: Sequence[str], patterns: Sequence[str], chosen: Container[str] = ()
) -> tuple[list[str], list[str]]:
    """Return `names` that are `chosen` or match a pattern, and the patterns that match none."""
    missing = [p for p in patterns if not any(_matches(name, p) for name in names)]
    return [n for n in names if n in chosen or any(_matches(n, p) for p in patterns)], missing


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern)


def check_adapters(model: PreTrainedModel, section: AdaptersSection) -> list[Problem]:
    """Return problems with `section` for this model, which may be on the meta device."""
    stacked, unknown = find_parameters(model, section)
    if unknown:
        rule = "matches no stacked weight of experts; only those can have such adapters"
        known = find_parameters(model, section.model_copy(update={"target_parameters": ("*",)}))[0]
        kinds = ", ".join(sorted({name.rpartition(".")[2] for name in known}))
        remedy = f"some of: {kinds}" if kinds else "remove it: the model has none"
        return [Problem(PARAMETERS_KEY, pattern, rule, remedy) for pattern in unknown]
    if stacked and not section.target_parameters and (section.dora or section.dropout):
        name, off = ("dora", "false") if section.dora else ("dropout", "0")
        rule = f"are the stacked weights of experts here, and peft has no {name} for those"
        return [Problem(KEY, "mlp", rule, f"adapters.{name}={off}, or targets without mlp")]
    names, missing = find_targets(model, section)
    if refused := _refused(model, names):
        return [refused]
    if section.dora and (taken := _taken_for_experts(model, names)):
        ends = sorted({name.rpartition(".")[2] for name in taken})
        rule = f"peft takes {' and '.join(ends)} of this architecture for experts', and has no dora"
        remedy = "adapters.dora=false, or targets without those"
        return [Problem("adapters.dora", True, rule, remedy)]
    if packed := _check_quantized(model, section):
        return packed
    if saved := _check_saved(model, section, names):
        return saved
    linear, _ = find_targets(model, AdaptersSection())
    ends = sorted({name.rpartition(".")[2] for name in linear})
    if section.targets == "all-linear" and not names:
        rule = "the model has no linear layer except its head"
        return [Problem(KEY, section.targets, rule, "leave adapters out")]
    remedy = f"all-linear, or some of: {', '.join(ends)}"
    rule = "matches no linear layer except the head; only those can have adapters"
    kind = "is a kind of layers of which nothing is known in this architecture"
    return [Problem(KEY, name, kind if name in PRESETS else rule, remedy) for name in missing]


def _refused(model: PreTrainedModel, names: list[str]) -> Problem | None:
    """Check for layers that peft refuses: it looks for Mamba's, next to convolutions."""
    if not any(isinstance(module, nn.Conv1d) for module in model.modules()):
        return None
    ends = {name.rpartition(".")[2] for name in names}
    with quiet_bitsandbytes():
        refused = refused_by_peft(model, ends)
    if not refused:
        return None
    others = ", ".join(sorted(ends - refused))
    rule = "peft refuses adapters next to Mamba, whose kernels read only these weights"
    return Problem(KEY, ", ".join(sorted(refused)), rule, f"some of: {others}")


def _check_quantized(model: PreTrainedModel, section: AdaptersSection) -> list[Problem]:
    if not section.is_quantized:
        return []
    if stacks := stacks_of(model, "mlp"):
        rule = f"{stacks[0]} is a stacked weight, and only linear layers have weights in 4 bits"
        return [Problem(QUANTIZED_KEY, section.quantization, rule, f"{QUANTIZED_KEY}=none")]
    quantized_saved = set(find_saved(model, section)[0]).intersection(quantized_layers(model))
    rule = "{} would be in 4 bits, and a copy of it cannot be trained"
    remedy = f"an adapter for it (adapters.targets), or {QUANTIZED_KEY}=none"
    value = list(section.modules_to_save)
    return [
        Problem(SAVED_KEY, value, rule.format(name), remedy) for name in sorted(quantized_saved)
    ]


def quantized_layers(model: PreTrainedModel) -> list[str]:
    """Return names of the layers whose weights ``adapters.quantization`` keeps in 4 bits, in the
    model's order: those that transformers chooses (all linear layers but the head and what it keeps
    in float32). `model` may be on the meta device, and is not quantized."""
    kept = [*get_keys_to_not_convert(model), *kept_in_float32(model)]
    return [
        name
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or isinstance(module, Conv1D))
        and should_convert_module(name, kept)
    ]


def _score_heads(model: PreTrainedModel) -> list[str]:
    """Return names of the modules of the head of a model that scores samples."""
    if not has_score_head(model):
        return []
    return list(dict.fromkeys(name.rpartition(".")[0] for name in head_parameters(model)))


def _check_saved(
    model: PreTrainedModel, section: AdaptersSection, targets: list[str]
) -> list[Problem]:
    names, missing = find_saved(model, section)
    heads = _score_heads(model)
    if not set(heads) <= set(names):
        rule = f"does not name {' and '.join(heads)}, the head that scores, which would stay random"
        value = [*section.modules_to_save, *(n.rpartition(".")[2] for n in heads)]
        return [Problem(SAVED_KEY, list(section.modules_to_save), rule, f"{SAVED_KEY}={value}")]
    remedy = "patterns of modules with weights of their own, such as [lm_head] or [norm]"
    rule = "matches no module that has weights itself"
    problems = [Problem(SAVED_KEY, pattern, rule, remedy) for pattern in missing]
    shared = names_of(model.named_parameters(remove_duplicate=False))
    for name in names:
        if adapted := [t for t in targets if f"{t}.".startswith(f"{name}.")]:
            rule, remedy = f"{adapted[0]} has an adapter as well", "remove it from one of the two"
            problems.append(Problem(SAVED_KEY, list(section.modules_to_save), rule, remedy))
        for parameter in model.get_submodule(name).parameters():
            if len(tied := shared[id(parameter)]) > 1:
                rule = f"{' and '.join(tied)} are tied: a copy that is trained would part them"
                remedy = "remove it, or use a model whose weights are not tied"
                problems.append(Problem(SAVED_KEY, list(section.modules_to_save), rule, remedy))
    return problems


def lora_config(model: PreTrainedModel, section: AdaptersSection) -> LoraConfig:
    """peft's configuration of these adapters of `model`, without the base's name."""
    with quiet_bitsandbytes():
        from peft import LoraConfig

    names, _ = find_targets(model, section)
    return LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        lora_dropout=section.dropout,
        use_rslora=section.rslora,
        use_dora=section.dora,
        modules_to_save=find_saved(model, section)[0] or None,
        target_modules=names,
        target_parameters=find_parameters(model, section)[0] or None,
        fan_in_fan_out=bool(names) and isinstance(model.get_submodule(names[0]), Conv1D),
        task_type="SEQ_CLS" if has_score_head(model) else "CAUSAL_LM",
    )


def file_config(model: PreTrainedModel, section: AdaptersSection) -> LoraConfig:
    """Return `lora_config` for peft's files: their reader converts the names of targets. A layer
    whose name peft treats as an expert's is written as its weight (``target_parameters``): to the
    same product of the same two matrices, but without dropout, which peft has none for then."""
    config: Any = lora_config(model, section)
    if taken := _taken_for_experts(model, config.target_modules):
        config.target_modules = [n for n in config.target_modules if n not in taken]
        config.target_parameters = [
            *(config.target_parameters or ()),
            *(f"{name}.weight" for name in taken),
        ]
        config.lora_dropout = 0.0
    converted: LoraConfig = config
    return converted


def _taken_for_experts(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    names = list(names)
    with quiet_bitsandbytes():
        ends = taken_for_experts(model, {name.rpartition(".")[2] for name in names})
    return [name for name in names if name.rpartition(".")[2] in ends]


@contextmanager
def quiet_bitsandbytes() -> Iterator[None]:
    """Inside, bitsandbytes is imported without its remark that a kernel could be downloaded for
    this CPU. peft imports it wherever it is installed."""
    with only_errors("bitsandbytes"):
        yield


@torch.no_grad()
def add_adapters(
    model: PreTrainedModel, section: AdaptersSection, seed_of: Callable[[str], int]
) -> None:
    """Inject adapters into the layers of `model`, in place, and freeze everything else.

    Their initial values are peft's, from a random stream per layer: `seed_of` the layer's name. So
    they do not depend on the model's device and dtype, nor on whether its own parameters are
    partitioned; the adapters' are full. `models.weights.quantized` fills initial values that are a
    function of the model's weights. Collective if those are partitioned and some are copied
    (`modules_to_save`).
    """
    from peft import inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), quiet_bitsandbytes():
        # About layers that peft supports in several ways, and Conv1D.
        warnings.simplefilter("ignore")
        config = lora_config(model, section)
        names = {*(config.target_modules or ()), *(config.target_parameters or ())}
        targets = map(model.get_submodule, config.target_modules or ())
        with _zeros_for_weights(targets if section.dora else ()), targets_as_named():
            inject_adapter_in_model(config, model)
        assert _adapted_names(model) == names, "peft adapted other layers than requested"
        for name, module in model.named_modules():
            if isinstance(module, LoraLayer):
                torch.manual_seed(seed_of(name))
                own = [p for n, p in module.named_parameters() if not n.startswith("base_layer.")]
                _initialize(module, own)


def _adapted_names(model: nn.Module) -> set[str]:
    """Return names of the linear layers and of the stacked weights that have adapters."""
    from peft.tuners.lora import LoraLayer

    stacks = parameter_layers(model)
    own = {name for name, _ in stacks.values()}
    layers = {name for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    return layers - own | stacks.keys()


@contextmanager
def _zeros_for_weights(layers: Iterable[Any]) -> Iterator[None]:
    """Show zeros for weights inside: peft computes DoRA's magnitudes, and they may be
    partitioned."""
    with ExitStack() as stack:
        for layer in layers:
            weight = layer.weight
            if type(weight) is nn.Parameter:  # not one in 4 bits
                zeros = weight.new_zeros(()).expand(local_shape(weight))
                stack.enter_context(shadowed(layer, {"weight": zeros}))
        yield


def _initialize(layer: Any, parameters: list[nn.Parameter]) -> None:
    """Fill a layer's adapter in float32 on the CPU, rounded into place after."""
    homes = [parameter.data for parameter in parameters]
    for parameter, home in zip(parameters, homes, strict=True):
        parameter.data = torch.ones(home.shape, dtype=torch.float32)
    layer.reset_lora_parameters(ADAPTER, True)
    for parameter, home in zip(parameters, homes, strict=True):
        home.copy_(parameter.data)
        parameter.data = home
        mark_initialized(parameter)  # where the model's own weights are drawn afterwards


LINEAR = (nn.Linear, Conv1D)
"""Kinds of layers that peft gives adapters to; see `is_product`."""
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)


def is_product(module: nn.Module) -> bool:
    """Return whether `module` is a linear layer to which a product of two matrices can be added. Of
    subclasses with a forward pass of their own some are not: routers that return their choice
    (Llama 4's), products of groups (DeepSeek-V4's). One is called without data."""
    if not isinstance(module, LINEAR):
        return False
    if type(module) in LINEAR or not type(module).__module__.startswith("transformers."):
        return True
    own = module.named_parameters(recurse=False)
    weights = {name: torch.empty(local_shape(p), device="meta") for name, p in own}
    inputs = torch.empty(3, module.in_features, device="meta")
    try:
        outputs = functional_call(module, weights, (inputs,))
    except (IndexError, RuntimeError, TypeError, ValueError):
        return False
    return isinstance(outputs, torch.Tensor) and outputs.shape == (3, module.out_features)


def layers_of(model: PreTrainedModel, preset: Preset) -> list[str]:
    """Return names of the linear layers of a kind, in the model's order; none if the model has no
    attention that can be distinguished from the rest."""
    return [name for name, kind in _kinds(model).items() if kind == preset]


def stacks_of(model: PreTrainedModel, preset: Preset) -> list[str]:
    """Return names of the stacked weights of experts of a kind: all are of `mlp`."""
    if preset != "mlp":
        return []
    return stacked_weights(model)


def stacked_weights(model: nn.Module) -> list[str]:
    """Return names of the weights of experts that are stacked, [experts, ...], in the model's
    order."""
    return [
        name
        for name, entry in parameter_roles(model).items()
        if entry.role is Role.EXPERTS and len(local_shape(parameter_of(model, name))) == 3
    ]


def _kinds(model: PreTrainedModel) -> dict[str, Preset]:
    """Return the kind of each linear layer of a decoder layer that is of one."""
    classes = attention_classes(model)
    kinds: dict[str, Preset] = {}
    routed = {e.module for e in parameter_roles(model).values() if e.role is Role.ROUTER}
    for layer_name, layer in decoder_layers(model):
        attention = {
            name for name, module in _modules(layer) if _is_attention(module, classes, layer)
        }
        mixers = {name for name, module in layer.named_children() if _has(module, _CONVOLUTIONS)}
        for name, module in _modules(layer):
            if not is_product(module):
                continue
            if _is_in(name, attention):
                kinds[f"{layer_name}.{name}"] = "attention"
            elif not _is_in(name, mixers) and f"{layer_name}.{name}" not in routed:
                kinds[f"{layer_name}.{name}"] = "mlp"
    return kinds if classes or "attention" in kinds.values() else {}


def _modules(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, module) for name, module in layer.named_modules() if name)


def _is_attention(module: nn.Module, classes: tuple[type, ...], layer: nn.Module) -> bool:
    if classes:
        return isinstance(module, classes)
    is_child = any(module is child for child in layer.children())
    return is_child and hasattr(module, "head_dim") and not _has(module, _CONVOLUTIONS)


def _has(module: nn.Module, kinds: tuple[type, ...]) -> bool:
    return any(isinstance(inner, kinds) for inner in module.modules())


def _is_in(name: str, parents: set[str]) -> bool:
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)
