"""Equivalence of a model's tensor-parallel plan and the unsharded model. Plans come from
transformers and some are silently wrong: a parameter that only sees a rank's heads gets a part of
the gradient, or a mean is taken over a part of a dimension."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig, PreTrainedModel

from bigtrain.errors import ModelError, Problem
from bigtrain.models.build import empty_model
from bigtrain.models.configuration import text_config
from bigtrain.models.equivalence.proxy_model import (
    MODEL_FAILURES,
    add_noise,
    build_proxy_model,
    failure_text,
)
from bigtrain.models.equivalence.reductions import deterministic, smaller, with_heads
from bigtrain.models.equivalence.trial import (
    GRADIENT,
    LOSS,
    SHARDED,
    LocalTensor,
    Results,
    Trial,
    training_results,
)
from bigtrain.models.layers.adapter_targets import find_parameters, find_targets
from bigtrain.models.layers.adapters import add_adapters
from bigtrain.models.parallel.collectives import Group
from bigtrain.models.parallel.grouped_experts import fit_experts
from bigtrain.models.parallel.sharding import cut_parameter, shard_of
from bigtrain.models.parallel.tensor import ADAPTED, check_shards, shard_model, tensor_plan
from bigtrain.settings.compatibility.check import check_model
from bigtrain.settings.compatibility.facts import Facts
from bigtrain.settings.hf_config_keys import HEAD_PROJECTIONS, KEY_HEAD_PROJECTIONS
from bigtrain.settings.sections.adapters import AdaptersSection

_FAILS = "it fails with"
_MAX_PARAMETERS = 50_000_000


def check_tensor_plan(
    hf_config: PreTrainedConfig,
    attention: str,
    sequence_length: int,
    group: Group,
    device: torch.device,
    *,
    adapters: AdaptersSection | None = None,
) -> None:
    """Raise ModelError, on every rank, unless a sharded proxy model computes the same as the full
    proxy model.

    `sequence_length`: tokens of the run's samples. `adapters`: the run's adapters, which the proxy
    model gets on its layers too; all parameters are trained. The message names the parameter whose
    gradient is wrong. Collective over `group`; takes a second or two.
    """
    size = dist.get_world_size(group)
    model_type = hf_config.model_type

    def usable(model: PreTrainedModel) -> None:
        add_noise(model)
        num_parameters = sum(p.numel() for p in model.parameters())
        if num_parameters > _MAX_PARAMETERS:
            raise ValueError(f"it still has {num_parameters} parameters")
        training_results(model.to(device))

    try:
        # The fewest heads and key-value heads that `size` ranks divide like the model's heads.
        config = text_config(hf_config)
        heads = key_heads = size
        real_heads = getattr(config, "num_attention_heads", None)
        real_key_heads = getattr(config, "num_key_value_heads", None) or real_heads
        if real_key_heads is not None and real_key_heads < size:
            key_heads = real_key_heads
        elif real_key_heads != real_heads:
            heads = 2 * size
        small_heads = with_heads(heads, key_heads, head_size=16)
        reductions = smaller(small_heads, with_heads(heads, key_heads))
        proxy = build_proxy_model(
            deterministic(hf_config), attention, reductions, usable, sequence_length=sequence_length
        )
    except (ValueError, AttributeError) as error:
        raise ModelError(
            f"parallel.tensor: a proxy model of {model_type} could not be tested: "
            f"{failure_text(error)} -> parallel.tensor=1"
        ) from error
    if adapters is not None:
        _adapt(proxy, hf_config, adapters)
    # Every rank compares the sharded model with the full one, and gets the first failure of a rank.
    failure: str | None = None
    try:
        difference = Trial(training_results, partial(_sharded, group), SHARDED).difference(proxy)
        if difference is not None:
            failure = f"{difference.where} differs from the unsharded model"
    except MODEL_FAILURES as error:
        failure = f"{_FAILS} {type(error).__name__}: {failure_text(error)}"
    failures: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(failures, failure, group=group)
    failure = next((reason for reason in failures if reason is not None), None)
    if failure is not None:
        verdict = "cannot be carried out" if failure.startswith(_FAILS) else "is wrong"
        raise ModelError(
            f"parallel.tensor = {size}: the tensor-parallel plan for "
            f"model_type {model_type} {verdict}: on a proxy model, {failure} -> parallel.tensor=1, "
            "and ZeRO 3 for models too large for one device"
        )


@torch.no_grad()
def _adapt(proxy: PreTrainedModel, hf_config: PreTrainedConfig, section: AdaptersSection) -> None:
    """Add random adapters to the layers of `proxy` with the names of the layers that the run
    adapts."""
    real_model = empty_model(hf_config)
    changes: dict[str, Any] = {"rank": 4, "dropout": 0.0}
    for key, find in (("targets", find_targets), ("target_parameters", find_parameters)):
        changes[key] = tuple(
            sorted({n.rpartition(".")[2] for n in find(real_model, section).names})
        )
    generator = torch.Generator().manual_seed(2)
    add_adapters(proxy, section.model_copy(update=changes), lambda _: 0)
    for name, parameter in proxy.named_parameters():
        parameter.requires_grad_()
        if ".lora_B." in name:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.1 * noise)


def _sharded(group: Group, model: PreTrainedModel) -> Results:
    shard_model(model, tensor_plan(model), group)
    for parameter in model.parameters():
        cut_parameter(parameter)
    fit_experts(model)
    results = training_results(model)
    local = {}
    for name, parameter in model.named_parameters():
        shard = shard_of(parameter)
        assert shard is not None
        local[name] = LocalTensor(results[GRADIENT][name], shard)
    return {LOSS: results[LOSS], GRADIENT: local}


def check_tensor_size(
    hf_config: PreTrainedConfig, tensor_size: int, adapters: AdaptersSection | None = None
) -> list[Problem]:
    """Return problems with `parallel.tensor`; empty if the model's plan can be carried out. Builds
    the model without memory (`meta`). Raises ModelError for an architecture without a plan, and for
    a parameter that cannot be split. `check_tensor_plan` tests whether the plan is right."""
    if tensor_size == 1:
        return []
    try:
        model = empty_model(hf_config)
    except (ValueError, ImportError) as error:
        raise ModelError(f"model.config: {error}") from error
    adapted = [] if adapters is None else list(find_targets(model, adapters).names)
    plan = tensor_plan(model, adapted)
    # An attention head is on one rank; key-value heads may be shared.
    config = text_config(hf_config)
    cut = {name.rpartition(".")[2] for name, style in plan.items() if style == "colwise"}
    heads = config.num_attention_heads if cut & HEAD_PROJECTIONS else None
    key_heads = getattr(config, "num_key_value_heads", None) if cut & KEY_HEAD_PROJECTIONS else None
    problems = check_model(
        Facts(
            tensor_size=tensor_size,
            cut_heads=heads if isinstance(heads, int) else None,
            cut_key_heads=key_heads if isinstance(key_heads, int) else None,
        )
    )
    if adapters is not None:
        # Adapters support only some styles of a plan.
        styles = {name: plan.get(name, "replicate") for name in adapted}
        problems += [
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
    if not problems:
        check_shards(model, plan, tensor_size)
    return problems
