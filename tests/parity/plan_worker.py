"""One of two processes that check tensor-parallel plans, right and wrong, before a run.

Argument: a file for rank 0 to write what each check said to.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import CONFIG_MAPPING

from bigtrain.engine.startup.process_group import process_group
from bigtrain.errors import ModelError
from bigtrain.models.equivalence.tensor_parallel import check_tensor_plan
from bigtrain.models.parallel import recurrent_divisions, recurrent_layers
from bigtrain.models.torch_patches import shadowed
from bigtrain.settings.run_config import AdaptersSection
from bigtrain.system.world import read_world
from tests.support.hybrids import HYBRIDS, hybrid_config


def configs() -> dict[str, Any]:
    """Full-size configurations, and two whose plan was spoilt."""
    without_sum = CONFIG_MAPPING["qwen3"]()
    without_sum.base_model_tp_plan = {
        name: style
        for name, style in without_sum.base_model_tp_plan.items()
        if not name.endswith("k_norm")
    }
    uncut = CONFIG_MAPPING["llama"]()
    uncut.base_model_tp_plan = {**uncut.base_model_tp_plan, "layers.*.mlp.down_proj": "replicate"}
    return {
        "qwen3_moe": CONFIG_MAPPING["qwen3_moe"](),
        "gemma2": CONFIG_MAPPING["gemma2"](),
        "apertus": CONFIG_MAPPING["apertus"](),
        "without_sum": without_sum,
        "uncut": uncut,
        # Each as it is cut: fused layers, few key-value heads, latent attention.
        "phi3": CONFIG_MAPPING["phi3"](),
        "gemma": CONFIG_MAPPING["gemma"](num_key_value_heads=1),
        "minicpm3": CONFIG_MAPPING["minicpm3"](),
        **{name: hybrid_config(name) for name in HYBRIDS},
    }


ADAPTED = ("phi3", "gemma", "minicpm3")
MUTATIONS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    # A fused projection divided as one; a norm of a rank's channels; a rank's gradient of B and C.
    "fused": (
        "qwen3_5_text",
        recurrent_divisions,
        {"ranges_of": lambda parts, rank, size: _even(sum(parts), rank, size)},
    ),
    "local_norm": ("bamba", recurrent_layers, {"_over_ranks": lambda forward, *_: forward}),
    "local_gradient": ("bamba", recurrent_layers, {"sum_gradient": lambda x, group: x}),
    "local_time_steps": ("jamba", recurrent_divisions, {"_PARTIAL_GRADIENT": "replicate"}),
}
"""A model type, and what is replaced in a module of the division of recurrent layers."""


def _even(rows: int, rank: int, size: int) -> tuple[tuple[int, int], ...]:
    return ((rows * rank // size, rows * (rank + 1) // size),)


def said_of(config: Any, group: Any, device: Any, adapters: Any = None) -> str:
    """Return what the check says to a configuration; nothing if its plan is right."""
    try:
        check_tensor_plan(config, "auto", 32, group, device, adapters=adapters)
    except ModelError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    world = read_world(os.environ)
    said = {}
    with process_group(world) as joined:
        for name, config in configs().items():
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always", UserWarning)
                adapters = AdaptersSection(dropout=0.1) if name in ADAPTED else None
                said[name] = said_of(config, dist.group.WORLD, joined.device, adapters)
            # Every process of a run would say it.
            assert not [w for w in warned if "requires_grad" in str(w.message)], name
        for name, (model_type, module, replaced) in MUTATIONS.items():
            with shadowed(module, replaced):
                said[name] = said_of(hybrid_config(model_type), dist.group.WORLD, joined.device)
    Path(f"{sys.argv[1]}.{world.rank}").write_text(json.dumps(said))
