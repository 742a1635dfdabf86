"""LoRA adapters on the layers of a model: peft's own modules, injected in place.

peft wraps a layer: its weight `q_proj.weight` becomes `q_proj.base_layer.weight`, and the two
trained matrices are `q_proj.lora_A.default.weight` and `q_proj.lora_B.default.weight`. Everything
else keeps its name. `base_name` gives the name in the base model's files. Importing peft takes
seconds, so only runs with adapters do it.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from bigtrain.errors import Problem
from bigtrain.models.layers.adapter_presets import LINEAR, layers_of, stacks_of
from bigtrain.models.layers.parameters import names_of
from bigtrain.models.transformers_patches import kept_in_float32, mark_initialized
from bigtrain.settings.sections.adapters import PRESETS, AdaptersSection

if TYPE_CHECKING:
    from peft import LoraConfig

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
    """The name of a parameter or buffer in the model without adapters; also for trained copies."""
    return _OWN.sub(".", name)


def weight_of(name: str) -> str:
    """The base weight that parameter `name` is, or that its adapter is added to."""
    adapter = _TRAINED.search(name)
    return base_name(name) if adapter is None else f"{name[: adapter.start()]}.weight"


def peft_name(name: str) -> str:
    """The name of an adapter's parameter in peft's files."""
    if name.endswith(MAGNITUDE):
        name = name.removesuffix(".weight") + "."
    return f"base_model.model.{name.replace(COPY, '.')}".replace(f".{ADAPTER}.", ".").rstrip(".")


def has_adapters(model: nn.Module) -> bool:
    """Whether `model` has adapters, and its own weights are frozen.

    True for every pipeline stage of such a model, even one whose layers have none.
    """
    return hasattr(model, "peft_config")  # which peft sets when it injects adapters


def find_targets(model: PreTrainedModel, section: AdaptersSection) -> tuple[list[str], list[str]]:
    """(names of the layers that get adapters, patterns that match none), in the model's order.

    Only linear layers, and never the head, whatever the patterns match.
    """
    head = model.get_output_embeddings()
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, LINEAR) and module is not head
    ]
    if section.targets == "all-linear":
        return linear, []
    patterns = section.patterns
    missing = [p for p in patterns if not any(_matches(name, p) for name in linear)]
    chosen: set[str] = set()
    for preset in section.presets:
        found = layers_of(model, preset)
        chosen.update(found)
        if not found and not stacks_of(model, preset):
            missing.append(preset)
    return [n for n in linear if n in chosen or any(_matches(n, p) for p in patterns)], missing


def find_parameters(
    model: PreTrainedModel, section: AdaptersSection
) -> tuple[list[str], list[str]]:
    """(names of the stacked weights that get adapters, patterns that match none)."""
    stacked = [name for name, parameter in model.named_parameters() if parameter.ndim == 3]
    patterns = section.target_parameters
    missing = [p for p in patterns if not any(_matches(name, p) for name in stacked)]
    chosen = {name for preset in section.presets for name in stacks_of(model, preset)}
    return [n for n in stacked if n in chosen or any(_matches(n, p) for p in patterns)], missing


def parameter_layers(model: nn.Module) -> dict[str, Any]:
    """For each stacked weight with adapters, by its `base_name`: the name of peft's layer, and the
    layer."""
    from peft.tuners.lora.layer import ParamWrapper

    return {
        f"{base_name(f'{name}.')}{module.parameter_name}": (name, module)
        for name, module in model.named_modules()
        if isinstance(module, ParamWrapper)
    }


def find_saved(model: PreTrainedModel, section: AdaptersSection) -> tuple[list[str], list[str]]:
    """(names of the modules in ``modules_to_save``, patterns that match none)."""
    own = [name for name, m in model.named_modules() if any(True for _ in m.parameters(False))]
    patterns = section.modules_to_save
    missing = [p for p in patterns if not any(_matches(name, p) for name in own)]
    return [name for name in own if any(_matches(name, p) for p in patterns)], missing


def trained_copy(module: Any) -> Any:
    """The trained copy of `module` (`modules_to_save`), which computes in its place, or itself."""
    copies = getattr(module, "modules_to_save", None)
    return copies[ADAPTER] if isinstance(copies, nn.ModuleDict) else module


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern)


def check_adapters(model: PreTrainedModel, section: AdaptersSection) -> list[Problem]:
    """Problems with `section` for this model, which may be on the meta device."""
    stacked, unknown = find_parameters(model, section)
    if unknown:
        rule = "matches no stacked weight of experts; those alone can have such adapters"
        known = find_parameters(model, section.model_copy(update={"target_parameters": ("*",)}))[0]
        kinds = ", ".join(sorted({name.rpartition(".")[2] for name in known}))
        remedy = f"some of: {kinds}" if kinds else "leave it out: the model has none"
        return [Problem(PARAMETERS_KEY, pattern, rule, remedy) for pattern in unknown]
    if stacked and not section.target_parameters and (section.dora or section.dropout):
        name, off = ("dora", "false") if section.dora else ("dropout", "0")
        rule = f"are the stacked weights of experts here, and peft has no {name} for those"
        return [Problem(KEY, "mlp", rule, f"adapters.{name}={off}, or targets without mlp")]
    names, missing = find_targets(model, section)
    if packed := _check_quantized(model, section):
        return packed
    if saved := _check_saved(model, section, set(names)):
        return saved
    linear, _ = find_targets(model, AdaptersSection())
    ends = sorted({name.rpartition(".")[2] for name in linear})
    if section.targets == "all-linear" and not names:
        rule = "the model has no linear layer beside its head"
        return [Problem(KEY, section.targets, rule, "leave adapters out")]
    remedy = f"all-linear, or some of: {', '.join(ends)}"
    rule = "matches no linear layer beside the head; only those can have adapters"
    kind = "is a kind of layers of which nothing is known in this architecture"
    return [Problem(KEY, name, kind if name in PRESETS else rule, remedy) for name in missing]


def _check_quantized(model: PreTrainedModel, section: AdaptersSection) -> list[Problem]:
    if not section.is_quantized:
        return []
    if stacks := stacks_of(model, "mlp"):
        rule = f"{stacks[0]} is a stacked weight, and only linear layers have weights in 4 bits"
        return [Problem(QUANTIZED_KEY, section.quantization, rule, f"{QUANTIZED_KEY}=none")]
    found = set(find_saved(model, section)[0]).intersection(quantized_layers(model))
    rule = "{} would be in 4 bits, and a copy of it cannot be trained"
    remedy = f"an adapter for it (adapters.targets), or {QUANTIZED_KEY}=none"
    value = list(section.modules_to_save)
    return [Problem(SAVED_KEY, value, rule.format(name), remedy) for name in sorted(found)]


def quantized_layers(model: PreTrainedModel) -> list[str]:
    """Names of the layers whose weights ``adapters.quantization`` keeps in 4 bits, in the model's
    order: those that transformers chooses (all linear layers but the head and what it keeps in
    float32). `model` may be on the meta device, and is not quantized."""
    kept = [*get_keys_to_not_convert(model), *kept_in_float32(model)]
    return [
        name
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or isinstance(module, Conv1D))
        and should_convert_module(name, kept)
    ]


def _check_saved(
    model: PreTrainedModel, section: AdaptersSection, targets: set[str]
) -> list[Problem]:
    names, missing = find_saved(model, section)
    remedy = "patterns of modules with weights of their own, such as [lm_head] or [norm]"
    rule = "matches no module that has weights itself"
    problems = [Problem(SAVED_KEY, pattern, rule, remedy) for pattern in missing]
    shared = names_of(model.named_parameters(remove_duplicate=False))
    for name in names:
        if name in targets:
            rule, remedy = f"{name} has an adapter as well", "leave it out of one of the two"
            problems.append(Problem(SAVED_KEY, list(section.modules_to_save), rule, remedy))
        for parameter in model.get_submodule(name).parameters():
            if len(tied := shared[id(parameter)]) > 1:
                rule = f"{' and '.join(tied)} are tied: a copy that is trained would part them"
                remedy = "leave it out, or a model whose weights are not tied"
                problems.append(Problem(SAVED_KEY, list(section.modules_to_save), rule, remedy))
    return problems


def lora_config(model: PreTrainedModel, section: AdaptersSection) -> LoraConfig:
    """peft's configuration of these adapters of `model`, without the base's name."""
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
        task_type="CAUSAL_LM",
    )


@contextmanager
def quiet_bitsandbytes() -> Iterator[None]:
    """Inside, bitsandbytes is imported without its remark that a kernel could be downloaded for
    this CPU. peft imports it wherever it is installed."""
    log = logging.getLogger("bitsandbytes")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


@torch.no_grad()
def add_adapters(
    model: PreTrainedModel, section: AdaptersSection, seed_of: Callable[[str], int]
) -> None:
    """Inject adapters into the layers of `model`, in place, and freeze everything else.

    Their initial values are peft's, from a random stream per layer: `seed_of` the layer's name. So
    they do not depend on the model's device and dtype, nor on whether its own parameters are
    partitioned; the adapters' are full. `models.weights.adapted` fills initial values that are a
    function of the model's weights. Collective if those are partitioned and some are copied
    (`modules_to_save`).
    """
    from peft import inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), quiet_bitsandbytes():
        # About layers that peft supports in several ways, and Conv1D.
        warnings.simplefilter("ignore")
        inject_adapter_in_model(lora_config(model, section), model)
        for name, module in model.named_modules():
            if isinstance(module, LoraLayer):
                torch.manual_seed(seed_of(name))
                own = [p for n, p in module.named_parameters() if not n.startswith("base_layer.")]
                _initialize(module, own)


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
