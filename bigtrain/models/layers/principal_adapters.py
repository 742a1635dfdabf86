"""Adapters that begin as the principal components of the weights (PiSSA, Meng et al. 2024, arXiv
2404.02948), as peft's ``init_lora_weights="pissa"`` (0.21, tuners/lora/layer.py, `pissa_init`).

W is the weight of a layer [out, in], and U S V^T its singular value decomposition. With the r
largest singular values A_0 = sqrt(S_r / scale) V_r^T, B_0 = U_r sqrt(S_r / scale), and the frozen
weight becomes W - scale B_0 A_0. A layer keeps A_0 and B_0 in buffers: a checkpoint has them, and
the trained weight is W + scale (B A - B_0 A_0), which is an adapter of rank 2 r on W itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bigtrain.models.layers.adapter_names import ADAPTER

INITIAL = {"lora_A": "initial_lora_A", "lora_B": "initial_lora_B"}
"""Names of the buffers of a layer with the values that its matrices began with. They have the bits
of float32 as int32: an engine in 16 bits casts every buffer of floating-point numbers."""


def add_initial_values(layer: Any) -> None:
    """Give peft's `layer`, with full matrices, buffers of the `INITIAL` values, zeros."""
    for matrix, buffer in INITIAL.items():
        weight = getattr(layer, matrix)[ADAPTER].weight
        zeros = torch.zeros(weight.shape, dtype=torch.int32, device=weight.device)
        layer.register_buffer(buffer, zeros)


def principal_matrices(weight: torch.Tensor, rank: int, scale: float) -> dict[str, torch.Tensor]:
    """Return A_0 [rank, in] and B_0 [out, rank] of `weight` [out, in], float32 on its device, by
    the names of `INITIAL`."""
    u, singular_values, vh = torch.linalg.svd(weight.to(torch.float32), full_matrices=False)
    roots = torch.diag(torch.sqrt(singular_values[:rank] / scale))
    return {"lora_A": roots @ vh[:rank], "lora_B": u[:, :rank] @ roots}


def initial_product(layer: Any) -> torch.Tensor:
    """Return scale B_0 A_0 of peft's `layer`, float32, in the layout of the weight."""
    down, up = (
        getattr(layer, INITIAL[matrix]).view(torch.float32) for matrix in ("lora_A", "lora_B")
    )
    product: torch.Tensor = layer.scaling[ADAPTER] * up @ down
    return product.T if layer.fan_in_fan_out else product


def matrices_on_base(weights: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return lora_A and lora_B of layer `name` among a run's `weights`, as an adapter of the base's
    own weight: with `INITIAL` values A becomes [A; A_0], and B becomes [B, -B_0]. Lazy for lazy
    tensors. Raises KeyError if a matrix is missing."""
    matrices = {matrix: weights[f"{name}.{matrix}.{ADAPTER}.weight"] for matrix in INITIAL}
    if f"{name}.{INITIAL['lora_A']}" not in weights:
        return matrices
    initial = {
        matrix: weights[f"{name}.{buffer}"].view(torch.float32)
        for matrix, buffer in INITIAL.items()
    }
    return {
        "lora_A": torch.cat([matrices["lora_A"].to(torch.float32), initial["lora_A"]], 0),
        "lora_B": torch.cat([matrices["lora_B"].to(torch.float32), -initial["lora_B"]], 1),
    }
