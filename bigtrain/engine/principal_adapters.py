"""Start of adapters that begin as principal components of the base's weights (PiSSA): the ranks
share the decompositions, and each changes what it holds of the frozen weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from bigtrain.engine.checkpoint.fragments import MASTER, Fragment, owned_fragments
from bigtrain.engine.partitioning import run_dtype
from bigtrain.engine.train_engine import TrainEngine
from bigtrain.errors import ModelError
from bigtrain.models.build import empty_model
from bigtrain.models.layers.adapter_names import ADAPTER
from bigtrain.models.layers.adapter_targets import find_targets
from bigtrain.models.layers.principal_adapters import (
    INITIAL,
    initial_product,
    principal_matrices,
)
from bigtrain.models.weights.import_hf import Weights
from bigtrain.models.weights.lazy_tensors import allocate, forget_computed
from bigtrain.settings.run_config import RunConfig

Decomposed = dict[str, torch.Tensor] | None
GatherWork = Callable[[Callable[[], Decomposed]], list[Decomposed]]
"""Runs work on every rank, and returns all results in rank order (`LongWork.on_every_rank`)."""


@torch.no_grad()
def begin_principal_adapters(
    engine: TrainEngine,
    config: RunConfig,
    hf_config: Any,
    weights: Weights,
    *,
    is_new: bool,
    gather: GatherWork,
) -> None:
    """Subtract the initial product of every adapter from the frozen weight that the engine read.

    `is_new`: the adapters get their initial values first, from decompositions of the base's
    `weights` in the run's dtype; otherwise a checkpoint has restored the values. Collective. Call
    it once after `read_weights`. Raises ModelError for a target that is kept in float32.
    """
    section = config.adapters
    assert section is not None
    fragments = {
        fragment.name: fragment for fragment in owned_fragments(engine.engine, engine.module)
    }
    layers = {
        name: module
        for name, module in engine.module.named_modules()
        if hasattr(module, INITIAL["lora_A"])
    }
    if is_new:
        # In a round every rank decomposes one layer, of any pipeline stage.
        model = empty_model(hf_config)
        names = find_targets(model, section).names
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        for first in range(0, len(names), num_ranks):
            round_names = names[first : first + num_ranks]

            def decompose(round_names: list[str] = round_names) -> Decomposed:
                if rank >= len(round_names):
                    return None
                source = f"{round_names[rank]}.weight"
                full = allocate(tuple(weights.tensors[source].shape), run_dtype(config))
                weights.fill(source, (0, 0), full)
                forget_computed()
                full = full.to(engine.device)
                is_conv1d = hasattr(model.get_submodule(round_names[rank]), "nf")
                if is_conv1d:  # transformers' Conv1D has the transposed weight
                    full = full.T
                matrices = principal_matrices(full, section.rank, section.scale)
                return {matrix: values.cpu() for matrix, values in matrices.items()}

            for name, matrices in zip(round_names, gather(decompose), strict=False):
                assert matrices is not None
                if name in layers:
                    _set_initial(layers[name], name, matrices, fragments)

    for name, layer in layers.items():
        weight_name = f"{name}.base_layer.weight"
        if weight_name in engine.exact.values:
            raise ModelError(
                f"adapters.init = 'pissa': {weight_name} is kept in float32 by the architecture, "
                "which has not been compared with peft -> adapters.init=lora"
            )
        if weight_name in fragments:
            product = initial_product(layer)
            for box, view in fragments[weight_name].parts(MASTER):
                view.copy_(view.to(torch.float32) - product[box.slices].to(view.device))
    engine.refresh_parameters()


def _set_initial(
    layer: Any,
    name: str,
    matrices: Mapping[str, torch.Tensor],
    fragments: Mapping[str, Fragment],
) -> None:
    """Set this rank's parts of the matrices of a layer, if it has any, and the buffers of the layer
    with the initial values."""
    for matrix, values in matrices.items():
        getattr(layer, INITIAL[matrix]).copy_(values.view(torch.int32))
        fragment = fragments.get(f"{name}.{matrix}.{ADAPTER}.weight")
        if fragment is not None:
            for box, view in fragment.parts(MASTER):
                view.copy_(values[box.slices])
