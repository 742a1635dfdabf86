"""Padding of experts whose widths torch's grouped matrix products do not support.

Grouped products need every row of factors, and of the outputs' gradients, to begin at a
multiple of 16 bytes. Zeros change no product; transformers' own loop launches a kernel for each
expert, and waits for the device.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from bigtrain.models.layers.parameters import local_shape
from bigtrain.models.transformers_patches import (
    Product,
    grouped_experts,
    modules_of_experts,
    takes_any_width,
)

GROUPED_UNIT = 8
"""Elements: torch's grouped matrix products need rows of a multiple of 16 bytes, in 16 bit too."""
PADDED = "bigtrain_padded_grouped_mm"
"""The name in transformers' registry of experts' implementations."""


def fit_experts(model: PreTrainedModel) -> None:
    """Compute experts by padded grouped products if plain products do not support their widths.

    transformers uses grouped products for every class that has them, also for widths at which they
    fail: odd widths of a configuration or of a tensor-parallel shard. If padded products fail as
    well (tested), transformers loops over experts. All three implementations compute the same
    function. Parameters must have their final shapes.

    The choice depends only on widths, not on a timing: another implementation adds up in another
    order, so a resumed run, or another host's rank, could have other bits. The chosen
    implementation is the fastest wherever `benchmarks/expert_products.py` measured
    (docs/benchmarks.md).
    """
    if model.get_experts_implementation()[""] != "grouped_mm":
        return
    shapes = [
        local_shape(parameter)
        for module in modules_of_experts(model)
        for parameter in module.parameters(recurse=False)
    ]
    # Grouped products do not support every stack of matrices [experts, rows, columns].
    if any(len(shape) == 3 and any(n % GROUPED_UNIT for n in shape[1:]) for shape in shapes):
        model.set_experts_implementation(PADDED if padded_works() else "eager")


@cache
def padded_works() -> bool:
    """Return whether this torch computes padded products and their gradients; registers them if so.

    The result is cached for the process, so it is a function of the installed torch only. It is
    computed in a new thread, which has none of the caller's modes: under `no_grad` there is
    no gradient to compute, and autocast, a default device or a tracing mode compute something else.
    Ranks that called in different modes would choose different implementations.
    """
    with ThreadPoolExecutor(1) as pool:
        works = pool.submit(_computes_gradients).result()
    if works:
        grouped_experts(PADDED, _padded)
    return works


def _computes_gradients() -> bool:
    tensor_options: dict[str, Any] = {
        "dtype": torch.float32,
        "device": "cpu",
        "requires_grad": True,
    }
    rows, stacks = torch.ones(3, 5, **tensor_options), torch.ones(2, 7, 5, **tensor_options)
    ends = torch.tensor([1, 3], dtype=torch.int32, device="cpu")
    try:
        _padded(F.grouped_mm)(rows, stacks.transpose(-2, -1), ends).sum().backward()
    except (AttributeError, RuntimeError):  # of an older torch
        return False
    return True


def _padded(product: Product) -> Product:
    """Return `product` for factors of any width, by padding with zeros."""

    def padded(rows: torch.Tensor, stacks: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        """rows [n, in], stacks [experts, in, out], offs [experts]: [n, out]."""
        if takes_any_width(rows, stacks, offs):
            return product(rows, stacks, offs=offs)
        inner, outer = stacks.shape[-2:]
        more_inner, more_outer = -inner % GROUPED_UNIT, -outer % GROUPED_UNIT
        if stacks.stride(-1) == 1:
            filled = F.pad(stacks, (0, more_outer, 0, more_inner))
        else:
            # `stacks` is a transposed view of a contiguous parameter. The parameter's layout is
            # padded, so that the padded stacks are a transposed view, too.
            filled = F.pad(stacks.transpose(-2, -1), (0, more_inner, 0, more_outer))
            filled = filled.transpose(-2, -1)
        result = product(F.pad(rows, (0, more_inner)), filled, offs=offs)
        return result[..., :outer]

    return padded
