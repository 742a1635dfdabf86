"""Equivalence of a model's tensor-parallel plan, tested on a proxy model before a run.

Plans come from transformers and some are silently wrong: a parameter that only sees its rank's
heads gets a part of its gradient, or a mean is taken over a part of a dimension. The proxy model
runs unsharded and sharded on the run's own ranks, and every gradient is compared.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from bigtrain.errors import ModelError, Problem, one_line
from bigtrain.models.build import empty_model
from bigtrain.models.configuration import text_config
from bigtrain.models.equivalence.proxy_model import (
    MODEL_FAILURES,
    TOKENS,
    VOCABULARY,
    build_proxy_model,
    fewer_experts,
    set_heads,
)
from bigtrain.models.layers.adapters import add_adapters, find_parameters, find_targets
from bigtrain.models.parallel.collectives import Group
from bigtrain.models.parallel.grouped_experts import fit_experts
from bigtrain.models.parallel.sharding import cut_parameter, full_shape, shard_of
from bigtrain.models.parallel.tensor import (
    ADAPTED,
    Plan,
    check_shards,
    shard_model,
    tensor_plan,
)
from bigtrain.settings.compatibility.check import Facts, check_model
from bigtrain.settings.sections.adapters import AdaptersSection

# Relative to the parameter's largest gradient, and the model's: rounding of float32 is far below
# both, a part of a gradient or a wrong factor far above.
_RELATIVE, _ABSOLUTE = 1e-3, 1e-6
_LOSS = 1e-5
_FAILS = "it fails with"
_MAX_PARAMETERS = 50_000_000


def check_tensor_plan(
    hf_config: PreTrainedConfig,
    attention: str,
    sequence_length: int,
    group: Group,
    device: torch.device,
    adapters: AdaptersSection | None = None,
) -> None:
    """Raise ModelError, on every rank, unless a sharded proxy model computes the same as the full
    one.

    `sequence_length`: tokens of the run's samples. `adapters`: the run's; the proxy model has them
    on layers of the same kinds, and all parameters are trained. The message names the parameter
    whose gradient is wrong. Collective over `group`; takes a second or two.
    """
    size = dist.get_world_size(group)
    kind = hf_config.model_type
    if attention not in ("auto", "sdpa", "eager"):
        attention = "sdpa"  # other kernels have no float32

    def fewer_heads(config: Any) -> None:
        set_heads(config, *_heads(config, size))

    def fewer_heads_and_experts(config: Any) -> None:
        fewer_experts(config)
        fewer_heads(config)

    def smallest(config: Any) -> None:
        fewer_experts(config)
        set_heads(config, *_heads(config, size), head_size=16)

    def run_whole(model: PreTrainedModel) -> None:
        num_parameters = sum(p.numel() for p in model.parameters())
        if num_parameters > _MAX_PARAMETERS:
            raise ValueError(f"it still has {num_parameters} parameters")
        randomize(model)
        _forward(model.to(device)).backward()

    try:
        whole = build_proxy_model(
            deterministic(hf_config),
            attention,
            [smallest, fewer_heads_and_experts, fewer_heads],
            run_whole,
            sequence_length=sequence_length,
        )
    except ValueError as error:
        reason = one_line(error)
        raise ModelError(
            f"parallel.tensor: a proxy model of {kind} could not be tested: {reason} -> "
            "parallel.tensor=1"
        ) from error
    if adapters is not None:
        _adapt(whole, hf_config, adapters)
    failure = compare_with_whole(whole, group)
    if failure is not None:
        verdict = "cannot be carried out" if failure.startswith(_FAILS) else "is wrong"
        raise ModelError(
            f"parallel.tensor = {size}: the tensor-parallel plan that transformers has for "
            f"model_type {kind} {verdict}: on a proxy model, {failure} -> parallel.tensor=1, "
            "and ZeRO 3 for models too large for one device"
        )


@torch.no_grad()
def _adapt(proxy: PreTrainedModel, hf_config: PreTrainedConfig, section: AdaptersSection) -> None:
    """Add random adapters to the layers of `proxy` of the kinds that the run adapts."""
    whole = empty_model(hf_config)
    changes: dict[str, Any] = {"rank": 4, "dropout": 0.0}
    for key, find in (("targets", find_targets), ("target_parameters", find_parameters)):
        changes[key] = tuple(sorted({n.rpartition(".")[2] for n in find(whole, section)[0]}))
    generator = torch.Generator().manual_seed(2)
    add_adapters(proxy, section.model_copy(update=changes), lambda _: 0)
    for name, parameter in proxy.named_parameters():
        parameter.requires_grad_()
        if ".lora_B." in name:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.1 * noise)


def compare_with_whole(model: PreTrainedModel, group: Group) -> str | None:
    """Return the difference of `model` sharded over `group` and the full one; None if there is
    none.

    `model` is full, the same on every rank, deterministic, and on the group's device; do not use it
    afterwards. Collective; every rank returns the same.
    """
    model.zero_grad()
    cut = copy.deepcopy(model)
    loss = _forward(model)
    loss.backward()
    expected = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }
    failure: str | None = None
    try:
        shard_model(cut, tensor_plan(cut), group)
        for parameter in cut.parameters():
            cut_parameter(parameter)
        fit_experts(cut)
        cut_loss = _forward(cut)
        cut_loss.backward()
        failure = _difference(loss.item(), cut_loss.item(), expected, cut)
    except MODEL_FAILURES as error:
        failure = f"{_FAILS} {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    failures: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(failures, failure, group=group)
    return next((reason for reason in failures if reason is not None), None)


def _difference(
    loss: float, cut_loss: float, expected: Mapping[str, torch.Tensor], cut: nn.Module
) -> str | None:
    if not math.isfinite(loss):
        return f"its loss is {loss}, so that nothing can be compared"
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    worst, worst_name = 0.0, ""
    for name, parameter in cut.named_parameters():
        shard = shard_of(parameter)
        assert shard is not None
        assert full_shape(parameter) == tuple(expected[name].shape)
        wanted = shard.take(expected[name])
        have = torch.zeros_like(wanted) if parameter.grad is None else parameter.grad
        limit = _RELATIVE * float(expected[name].abs().max()) + _ABSOLUTE * largest
        distance = float((have - wanted).abs().max()) / limit if wanted.numel() else 0.0
        if not distance <= max(1.0, worst):
            worst, worst_name = distance, name
    if worst_name:
        return f"gradient of {worst_name} differs from the unsharded model"
    if not abs(cut_loss - loss) <= _LOSS * max(1.0, abs(loss)):
        return f"its loss is {cut_loss:.6f} instead of {loss:.6f}"
    return None


def _forward(model: PreTrainedModel) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    vocabulary = min(VOCABULARY, int(text_config(model.config).vocab_size))
    ids = torch.randint(3, vocabulary, (2, TOKENS), generator=generator)
    ids = ids.to(next(model.parameters()).device)
    loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def _heads(config: Any, size: int) -> tuple[int, int]:
    """Return the fewest heads, and key-value heads, that `size` ranks divide as they do the real
    ones."""
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    if key_heads < size:
        return size, key_heads
    return (size, size) if key_heads == heads else (2 * size, size)


def deterministic(hf_config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration without dropout or noise."""
    config = copy.deepcopy(hf_config)
    for part in {id(c): c for c in (config, text_config(config))}.values():
        for name, value in vars(part).items():
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(part, name, 0.0)
    return config


@torch.no_grad()
def randomize(model: PreTrainedModel) -> None:
    """Add noise to every parameter: ones and zeros would hide errors."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if not torch.isfinite(parameter).all():  # not initialized by the constructor
            parameter.zero_()
        parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))


def check_tensor_size(
    hf_config: PreTrainedConfig, tensor_size: int, adapters: AdaptersSection | None = None
) -> list[Problem]:
    """Return problems with `parallel.tensor`; empty if the model's plan can be carried out.

    Builds the model without memory (`meta`). Raises ModelError for an architecture without a plan,
    and for a parameter that cannot be split. `check_tensor_plan` tests whether the plan is right.
    """
    if tensor_size == 1:
        return []
    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(copy.deepcopy(hf_config))
    except (ValueError, ImportError) as error:
        raise ModelError(f"model.config: {error}") from error
    plan = tensor_plan(model)
    problems = _check_heads(text_config(hf_config), plan, tensor_size)
    if adapters is not None:
        problems += _check_adapted(model, plan, adapters)
    if not problems:
        check_shards(model, plan, tensor_size)
    return problems


def _check_adapted(model: PreTrainedModel, plan: Plan, section: AdaptersSection) -> list[Problem]:
    """Return problems with adapted layers that are sharded in a style without support for
    them."""
    names, _ = find_targets(model, section)
    styles = {name: plan.get(name, "replicate") for name in names}
    return [
        Problem(
            "adapters.targets",
            name,
            f"in the model's tensor-parallel plan it has the style {style!r}, for which no "
            "adapter is known",
            "remove it from the targets, or parallel.tensor=1",
        )
        for name, style in styles.items()
        if style not in ADAPTED
    ]


def _check_heads(config: Any, plan: Plan, size: int) -> list[Problem]:
    """Return problems with dividing heads: each is on one rank; ranks may share a key-value
    head."""
    cut = {name.rpartition(".")[2] for name, style in plan.items() if style == "colwise"}
    heads = config.num_attention_heads if cut & {"q_proj", "query_key_value"} else None
    key_heads = getattr(config, "num_key_value_heads", None) if "k_proj" in cut else None
    return check_model(
        Facts(
            tensor_size=size,
            cut_heads=heads if isinstance(heads, int) else None,
            cut_key_heads=key_heads if isinstance(key_heads, int) else None,
        )
    )
