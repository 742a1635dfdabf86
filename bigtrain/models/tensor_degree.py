"""Whether a model can be cut for a number of processes, found from its configuration alone."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from bigtrain.errors import ModelError, Problem
from bigtrain.models.configuration import text_config
from bigtrain.models.tensor_parallel import Plan, check_shards, tensor_plan

_MOST = 1024


def check_tensor_size(hf_config: PreTrainedConfig, tensor_size: int) -> list[Problem]:
    """Problems with `parallel.tensor`; empty where the model's plan can be carried out.

    Builds the model without memory (`meta`). Raises ModelError for an architecture without a plan,
    and for a parameter that cannot be cut. Whether the plan is right is `plan_check`'s business.
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
    if not problems:
        check_shards(model, plan, tensor_size)
    return problems


def _check_heads(config: Any, plan: Plan, size: int) -> list[Problem]:
    """Heads fall to processes whole; several processes may share a key-value head."""
    cut = {name.rpartition(".")[2] for name, style in plan.items() if style == "colwise"}
    heads = config.num_attention_heads if cut & {"q_proj", "query_key_value"} else None
    key_heads = getattr(config, "num_key_value_heads", None) if "k_proj" in cut else None
    if not isinstance(heads, int) or _falls(size, heads, key_heads):
        return []
    legal = [degree for degree in range(1, _MOST) if _falls(degree, heads, key_heads)]
    near = [*[d for d in legal if d < size][-1:], *[d for d in legal if d > size][:1]]
    have = f"num_attention_heads = {heads}" + (
        f" and num_key_value_heads = {key_heads}" if isinstance(key_heads, int) else ""
    )
    return [
        Problem(
            "parallel.tensor",
            size,
            f"does not divide the model's {have} into whole heads",
            f"nearest: {' or '.join(map(str, near))}",
        )
    ]


def _falls(size: int, heads: int, key_heads: Any) -> bool:
    shared = not isinstance(key_heads, int) or key_heads % size == 0 or size % key_heads == 0
    return heads % size == 0 and shared
