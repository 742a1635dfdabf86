"""Options applied to a model's layers before DeepSpeed wraps it: kernels, compilation, offload."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch

from bigtrain.models.layers.compilation import compile_layers, is_compiled
from bigtrain.models.layers.plans import TilePlan
from bigtrain.settings.compatibility.facts import read_facts
from bigtrain.settings.deepspeed.engine_config import EngineConfig
from bigtrain.settings.run_config import RunConfig


def apply_layer_options(
    model: Any,
    config: RunConfig,
    engine_config: EngineConfig,
    device: torch.device,
    tiles: TilePlan,
) -> bool:
    """Apply the run's kernels, tiles, activation offload and compilation to a complete `model`
    (split into its stage, filled, loss installed); return whether its layers are compiled. Raises
    ModelError if decoder layers of transformers' kind are needed and there are none."""
    section = config.model
    if section.kernels == "liger":
        from bigtrain.models.layers.kernels import apply_kernels

        apply_kernels(model)
    tiles.install(model)
    if section.activation_offload:
        from bigtrain.models.layers.activation_offload import offload_checkpoints

        offload_checkpoints(model, device.type)
    facts = read_facts(config, engine_config.deepspeed, None)
    device_type = cast(Literal["cpu", "cuda"], device.type)
    if not is_compiled(section.compile, device_type, allowed=facts.may_compile):
        return False
    compile_layers(model)
    return True
