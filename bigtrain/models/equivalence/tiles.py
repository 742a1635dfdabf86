"""Choice of the tiles in which a run computes its MLPs. Whether tiles compute the same is tested on
a proxy model."""

from __future__ import annotations

from collections.abc import Collection

from transformers import PreTrainedConfig, PreTrainedModel

from bigtrain.errors import ModelError, Problem
from bigtrain.models.build import empty_model
from bigtrain.models.configuration import text_config
from bigtrain.models.equivalence.loss import loss_and_gradients
from bigtrain.models.equivalence.proxy_model import MODEL_FAILURES, build_proxy_model, failure_text
from bigtrain.models.equivalence.trial import GRADIENT, LOSS, Results, Tolerance, Trial
from bigtrain.models.layers.adapter_targets import find_parameters
from bigtrain.models.layers.plans import NO_TILES, TilePlan
from bigtrain.models.layers.tiled_mlp import Tiles, find_mlps
from bigtrain.settings.batch_plan import BatchPlan
from bigtrain.settings.run_config import RunConfig
from bigtrain.settings.sections.model import auto_tiles

KEY = "model.tiled_mlp"
_TILE_TOKENS = 7
"""Tokens of a tile in the trial: they divide neither a sample nor the batch."""


def choose_tiles(
    config: RunConfig,
    hf_config: PreTrainedConfig,
    plan: BatchPlan,
    float32_names: Collection[str] = (),
) -> tuple[TilePlan, list[Problem]]:
    """Choose the tiles of a run with the micro-batches of `plan`; also return problems with the
    tiles. `float32_names`: float32 parameters of a 16-bit model, whose MLPs are not computed in
    tiles. ``auto`` computes MLPs as usual where one tile is enough or tiles are not supported.
    Takes a second, and no time with ``off``."""
    setting = config.model.tiled_mlp
    num_tokens = plan.micro_batch_tokens // config.parallel.degrees.sequence_size
    width = int(text_config(hf_config).hidden_size)
    num_tiles = auto_tiles(num_tokens, width) if setting == "auto" else setting
    if num_tiles == "off":
        return NO_TILES, []
    if num_tiles > num_tokens:
        rule = f"is more than the {num_tokens} tokens of a rank's micro-batch"
        return NO_TILES, [Problem(KEY, setting, rule, f"{KEY}={num_tokens}")]
    size = f"{num_tokens} tokens, hidden size {width}"
    if setting == "auto" and num_tiles == 1:
        return TilePlan(reason=f"MLPs: not in tiles ({size})"), []
    names, reason = _find(config, hf_config, plan.sequence_length, float32_names)
    if reason and setting == "auto":
        line = f"MLPs: not in tiles, which are not supported for {hf_config.model_type}: {reason}"
        return TilePlan(reason=line), []
    if reason:
        rule = f"is not supported for model_type {hf_config.model_type}: {reason}"
        return NO_TILES, [Problem(KEY, setting, rule, f"{KEY}=off")]
    tile_tokens = -(-num_tokens // num_tiles)
    line = f"MLPs: {len(names)} in {num_tiles} tiles of {tile_tokens} tokens ({size})"
    return TilePlan(tuple(names), tile_tokens, line), []


def _find(
    config: RunConfig,
    hf_config: PreTrainedConfig,
    sequence_length: int,
    float32_names: Collection[str],
) -> tuple[list[str], str]:
    """Return names of the modules that are computed in tiles, and why none can be."""
    model = empty_model(hf_config)
    names = find_mlps(model)
    float32_mlps = {n for n in names for name in float32_names if name.startswith(f"{n}.")}
    tiled_names = [name for name in names if name not in float32_mlps]
    if not names:
        return [], "its MLPs are not modules of their own inside decoder layers"
    if not tiled_names:
        return [], "its MLPs are kept in float32"
    if config.adapters is not None:
        stacks, _ = find_parameters(model, config.adapters)
        if stacks:
            return [], f"{stacks[0]} is a stack of experts with adapters"
    try:
        proxy = build_proxy_model(
            hf_config, config.model.attention, sequence_length=sequence_length
        )
        difference = TILED.difference(proxy.eval())
    except (ModelError, *MODEL_FAILURES) as error:
        return [], failure_text(error)
    if difference is None:
        return tiled_names, ""
    return [], f"the {difference.where} differs {difference.size}"


def _in_tiles(model: PreTrainedModel) -> Results:
    tiles = [Tiles(model.get_submodule(name), _TILE_TOKENS) for name in find_mlps(model)]
    try:
        return loss_and_gradients(model)
    finally:
        for tile in tiles:
            tile.remove()


TILED = Trial(
    loss_and_gradients,
    _in_tiles,
    # Float32 sums in another order make 1e-6.
    {LOSS: Tolerance(relative=1e-5), GRADIENT: Tolerance(common=1e-5)},
)
