"""Checks of the section ``adapters`` for a model."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from bigtrain.errors import Problem
from bigtrain.models.layers.adapter_targets import (
    find_parameters,
    find_saved,
    find_targets,
    quantized_layers,
    stacked_weights,
)
from bigtrain.models.layers.adapters import layers_taken_for_experts, quiet_bitsandbytes
from bigtrain.models.layers.parameters import has_score_head, head_parameters, names_of
from bigtrain.models.transformers_patches import refused_by_peft
from bigtrain.settings.sections.adapters import PRESETS, AdaptersSection

KEY = "adapters.targets"
SAVED_KEY = "adapters.modules_to_save"
PARAMETERS_KEY = "adapters.target_parameters"
QUANTIZED_KEY = "adapters.quantization"


def check_adapters(model: PreTrainedModel, section: AdaptersSection) -> list[Problem]:
    """Return problems with `section` for this model, which may be on the meta device: the problems
    of the first rule that is broken, since later rules assume the earlier ones."""
    rules = (_check_stacks, _check_support, _check_quantized, _check_saved, _check_targets)
    for rule in rules:
        problems = rule(model, section)
        if problems:
            return problems
    return []


def _check_stacks(model: PreTrainedModel, section: AdaptersSection) -> list[Problem]:
    stacked, unmatched = find_parameters(model, section)
    if unmatched:
        rule = "matches no stacked weight of experts; only those can have such adapters"
        all_stacks = section.model_copy(update={"target_parameters": ("*",)})
        leaf_names = ", ".join(_leaf_names(find_parameters(model, all_stacks).names))
        remedy = f"some of: {leaf_names}" if leaf_names else "remove it: the model has none"
        return [Problem(PARAMETERS_KEY, pattern, rule, remedy) for pattern in unmatched]
    if stacked and section.init == "pissa":
        rule = "are the stacked weights of experts here, and peft decomposes no stack"
        return [Problem(KEY, "mlp", rule, "adapters.init=lora, or targets without mlp")]
    if stacked and not section.target_parameters and (section.dora or section.dropout):
        name, off = ("dora", "false") if section.dora else ("dropout", "0")
        rule = f"are the stacked weights of experts here, and peft has no {name} for those"
        return [Problem(KEY, "mlp", rule, f"adapters.{name}={off}, or targets without mlp")]
    return []


def _check_support(model: PreTrainedModel, section: AdaptersSection) -> list[Problem]:
    """Check that peft supports adapters of the targets."""
    names = find_targets(model, section).names
    # peft looks for Mamba's layers, which are next to convolutions.
    if any(isinstance(module, nn.Conv1d) for module in model.modules()):
        leaf_names = _leaf_names(names)
        with quiet_bitsandbytes():
            refused = refused_by_peft(model, set(leaf_names))
        if refused:
            accepted = ", ".join(name for name in leaf_names if name not in refused)
            rule = "peft refuses adapters next to Mamba, whose kernels read only these weights"
            return [Problem(KEY, ", ".join(sorted(refused)), rule, f"some of: {accepted}")]
    ranks = {name: min(model.get_submodule(name).weight.shape) for name in names}
    if section.init == "pissa" and any(section.rank > rank for rank in ranks.values()):
        name, largest = min(ranks.items(), key=lambda item: item[1])
        rule = f"{name} has only {largest} principal components (adapters.init = 'pissa')"
        return [Problem("adapters.rank", section.rank, rule, f"adapters.rank={largest} or less")]
    if section.dora and (expert_names := layers_taken_for_experts(model, names)):
        leaf_text = " and ".join(_leaf_names(expert_names))
        rule = f"peft takes {leaf_text} of this architecture for experts', and has no dora"
        remedy = "adapters.dora=false, or targets without those"
        return [Problem("adapters.dora", True, rule, remedy)]
    return []


def _check_quantized(model: PreTrainedModel, section: AdaptersSection) -> list[Problem]:
    if not section.is_quantized:
        return []
    if stacks := stacked_weights(model):
        rule = f"{stacks[0]} is a stacked weight, and only linear layers have weights in 4 bits"
        return [Problem(QUANTIZED_KEY, section.quantization, rule, f"{QUANTIZED_KEY}=none")]
    quantized_saved = set(find_saved(model, section).names).intersection(quantized_layers(model))
    rule = "{} would be in 4 bits, and a copy of it cannot be trained"
    remedy = f"an adapter for it (adapters.targets), or {QUANTIZED_KEY}=none"
    value = list(section.modules_to_save)
    return [
        Problem(SAVED_KEY, value, rule.format(name), remedy) for name in sorted(quantized_saved)
    ]


def _check_saved(model: PreTrainedModel, section: AdaptersSection) -> list[Problem]:
    names, missing = find_saved(model, section)
    patterns = list(section.modules_to_save)

    # The head of a model that scores samples is new, and has to be trained.
    if has_score_head(model):
        heads = list(dict.fromkeys(name.rpartition(".")[0] for name in head_parameters(model)))
        if not set(heads) <= set(names):
            head_names = " and ".join(heads)
            rule = f"does not name {head_names}, the head that scores, which would stay random"
            value = [*patterns, *(name.rpartition(".")[2] for name in heads)]
            return [Problem(SAVED_KEY, patterns, rule, f"{SAVED_KEY}={value}")]

    remedy = "patterns of modules with weights of their own, such as [lm_head] or [norm]"
    rule = "matches no module that has weights itself"
    problems = [Problem(SAVED_KEY, pattern, rule, remedy) for pattern in missing]

    # A copy replaces its module: no layer of the module can have an adapter as well, and no other
    # module can share the weights.
    targets = find_targets(model, section).names
    shared = names_of(model.named_parameters(remove_duplicate=False))
    for name in names:
        if adapted := [t for t in targets if f"{t}.".startswith(f"{name}.")]:
            rule, remedy = f"{adapted[0]} has an adapter as well", "remove it from one of the two"
            problems.append(Problem(SAVED_KEY, patterns, rule, remedy))
        for parameter in model.get_submodule(name).parameters():
            if len(tied := shared[id(parameter)]) > 1:
                rule = f"{' and '.join(tied)} are tied: a copy that is trained would part them"
                remedy = "remove it, or use a model whose weights are not tied"
                problems.append(Problem(SAVED_KEY, patterns, rule, remedy))
    return problems


def _check_targets(model: PreTrainedModel, section: AdaptersSection) -> list[Problem]:
    names, missing = find_targets(model, section)
    if section.targets == "all-linear" and not names:
        rule = "the model has no linear layer except its head"
        return [Problem(KEY, section.targets, rule, "leave adapters out")]
    linear = find_targets(model, AdaptersSection()).names
    remedy = f"all-linear, or some of: {', '.join(_leaf_names(linear))}"
    rule = "matches no linear layer except the head; only those can have adapters"
    preset_rule = "is a kind of layers of which nothing is known in this architecture"
    return [
        Problem(KEY, name, preset_rule if name in PRESETS else rule, remedy) for name in missing
    ]


def _leaf_names(names: list[str]) -> list[str]:
    """Return the last parts of `names`, sorted, without duplicates."""
    return sorted({name.rpartition(".")[2] for name in names})
