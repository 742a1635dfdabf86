"""Shapes of models by name (`known_models.json`), and costs of layers with experts.

Pure. Costs are a closed form, as `bigtrain.planner.model_costs.closed_form`, which knows dense
layers: a row of a table has no configuration that could be traced.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bigtrain.planner.model_costs import (
    Attention,
    DenseShape,
    LayerCosts,
    Matmul,
    ModelCosts,
    closed_form,
)


@dataclass(frozen=True)
class ExpertDimensions:
    """Experts of a layer: `num` of `inner` width, of which a token is routed to `per_token`, in
    addition to `shared_inner` of shared ones. The first `num_dense_layers` have none; after them
    one layer in `every` has."""

    num: int
    per_token: int
    inner: int
    shared_inner: int = 0
    num_dense_layers: int = 0
    every: int = 1


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: ranks of queries (0: full) and of keys and values; widths of a
    head's part without and with rotary embedding, and of the head's values."""

    query_rank: int
    rank: int
    plain: int
    rotary: int
    value: int


@dataclass(frozen=True)
class PublishedModelShape:
    """Dimensions of a model. `window` of every `window_every`-th layer's attention."""

    dense: DenseShape
    experts: ExpertDimensions | None = None
    latent: Latent | None = None
    window: int | None = None
    window_every: int = 1


@functools.cache
def _table() -> list[dict[str, Any]]:
    text = Path(__file__).with_name("known_models.json").read_text(encoding="utf-8")
    models: list[dict[str, Any]] = json.loads(text)["models"]
    return models


def known_figures(name: str) -> Mapping[str, Any]:
    """Return the dimensions of the model called `name`; empty if unknown."""
    for entry in _table():
        if re.search(entry["pattern"], name, re.IGNORECASE):
            return entry
    return {}


def usual_shape(billions: float, *, gated: bool) -> Mapping[str, int]:
    """Return layers and hidden size of a model of which only the size is known: 128 hidden units
    for each layer, as in models from 1B to 175B (Llama 7B: 32 and 4,096)."""
    # 12 h^2 parameters in a layer, gated or not (`ffn` of rows), are 12 x 128^2 n^3 in n layers.
    layers = max(1, round((billions * 1e9 / (12 * 128**2)) ** (1 / 3)))
    return {"layers": layers, "hidden": 128 * layers, "vocab": 32000 if gated else 50257}


def costs_of(shape: PublishedModelShape, element_bytes: int = 2) -> ModelCosts:
    """Return the costs of a model of `shape`."""
    model = closed_form(shape.dense, element_bytes)
    plain = model.kinds[0]
    if shape.latent is not None:
        plain = _latent_layer(plain, shape.dense, shape.latent, element_bytes)
    layers: list[LayerCosts] = []
    for index in range(shape.dense.num_layers):
        layer = plain
        experts = shape.experts
        if (
            experts is not None
            and index >= experts.num_dense_layers
            and (index + 1) % experts.every == 0
        ):
            layer = _expert_layer(layer, shape.dense, experts, element_bytes)
        if shape.window is not None and index % shape.window_every == 0 and layer.attention:
            layer = replace(layer, attention=replace(layer.attention, window=shape.window))
        layers.append(layer)
    return model.with_layers(layers)


def _expert_layer(
    layer: LayerCosts, dense: DenseShape, experts: ExpertDimensions, element_bytes: int
) -> LayerCosts:
    """Return `layer` with experts instead of its feed-forward network: a router, products over
    groups, and tokens copied to `per_token` experts and back."""
    hidden, ups, scale = dense.hidden_size, 2 if dense.gated else 1, element_bytes / 2
    inner, met = experts.inner, experts.per_token
    width = met * inner + experts.shared_inner - dense.intermediate_size
    matmuls = [
        *layer.matmuls[:-2],
        Matmul(hidden, experts.num),
        Matmul(hidden, ups * inner, "out", experts.num, float(met)),
        Matmul(inner, hidden, "in", experts.num, float(met)),
    ]
    shared = experts.shared_inner
    if shared:
        matmuls += [Matmul(hidden, ups * shared, "out"), Matmul(shared, hidden, "in")]
    feed_forward = (ups + 1) * hidden
    return replace(
        layer,
        num_parameters_whole=layer.num_parameters_whole + hidden * experts.num,
        num_parameters_cut=layer.num_parameters_cut
        + feed_forward * (shared - dense.intermediate_size),
        num_parameters_expert=experts.num * feed_forward * inner,
        num_tensors=layer.num_tensors + 3,
        matmuls=tuple(matmuls),
        # Each copy of a token before its expert, and its output before the sum.
        saved_bytes_whole=layer.saved_bytes_whole + 4.0 * met * hidden * scale,
        saved_bytes_cut=layer.saved_bytes_cut + (8.0 if dense.gated else 4.0) * width * scale,
        moved_bytes_whole=layer.moved_bytes_whole + 8.0 * met * hidden * scale,
        moved_bytes_cut=layer.moved_bytes_cut + (10.0 if dense.gated else 4.0) * width * scale,
        num_kernels=layer.num_kernels + 20,
    )


def _latent_layer(
    layer: LayerCosts, dense: DenseShape, latent: Latent, element_bytes: int
) -> LayerCosts:
    """Return `layer` with latent attention: keys and values are of a shared short vector."""
    hidden, heads, scale = dense.hidden_size, dense.num_heads, element_bytes / 2
    width, short = latent.plain + latent.rotary, latent.rank
    queries = [Matmul(hidden, heads * width, "out")]
    if latent.query_rank:
        queries = [
            Matmul(hidden, latent.query_rank),
            Matmul(latent.query_rank, heads * width, "out"),
        ]
    attention = (
        *queries,
        Matmul(hidden, short + latent.rotary),
        Matmul(short, heads * (latent.plain + latent.value), "out"),
        Matmul(heads * latent.value, hidden, "in"),
    )
    head = dense.head_size or hidden // dense.num_heads
    before = heads * head + 2 * dense.num_key_value_heads * head
    after = heads * (2 * width + latent.value)  # queries, keys, values of each head

    def size(matmuls: tuple[Matmul, ...], cut: bool) -> int:
        return sum(m.in_size * m.out_size for m in matmuls if (m.cut is not None) == cut)

    old = layer.matmuls[:2]
    return replace(
        layer,
        num_parameters_whole=layer.num_parameters_whole + size(attention, False),
        num_parameters_cut=layer.num_parameters_cut - size(old, True) + size(attention, True),
        num_tensors=layer.num_tensors + 4,
        matmuls=(*attention, *layer.matmuls[2:]),
        attention=Attention(heads, heads, width, latent.value),
        saved_bytes_whole=layer.saved_bytes_whole + 2.0 * (latent.query_rank + short) * scale,
        saved_bytes_cut=layer.saved_bytes_cut + 2.0 * (after - before) * scale,
        moved_bytes_cut=layer.moved_bytes_cut + 14.0 * (after - before) * scale,
        num_kernels=layer.num_kernels + 12,
    )
