"""Whether a model can be cut for a number of processes, found from its configuration alone."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from bigtrain.errors import ModelError, Problem
from bigtrain.legality import Facts, check_model
from bigtrain.models.configuration import text_config
from bigtrain.models.tensor_parallel import Plan, check_shards, tensor_plan


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
    return check_model(
        Facts(
            tensor_size=size,
            cut_heads=heads if isinstance(heads, int) else None,
            cut_key_heads=key_heads if isinstance(key_heads, int) else None,
        )
    )
