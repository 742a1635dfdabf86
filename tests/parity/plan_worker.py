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
from bigtrain.settings.run_config import AdaptersSection
from bigtrain.system.world import read_world


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
    }


ADAPTED = ("phi3", "gemma", "minicpm3")


if __name__ == "__main__":
    torch.set_num_threads(1)
    world = read_world(os.environ)
    said = {}
    with process_group(world) as joined:
        for name, config in configs().items():
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always", UserWarning)
                try:
                    adapters = AdaptersSection(dropout=0.1) if name in ADAPTED else None
                    group = dist.group.WORLD
                    check_tensor_plan(config, "auto", 32, group, joined.device, adapters=adapters)
                    said[name] = ""
                except ModelError as error:
                    said[name] = str(error)
            # Every process of a run would say it.
            assert not [w for w in warned if "requires_grad" in str(w.message)], name
    Path(f"{sys.argv[1]}.{world.rank}").write_text(json.dumps(said))
