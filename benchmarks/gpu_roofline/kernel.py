"""A kernel of a step, and the parts of a step. Pure."""

from __future__ import annotations

from dataclasses import dataclass

PARTS = (
    "products",
    "experts",
    "casts",
    "attention",
    "norms",
    "rotary",
    "activations",
    "dispatch",
    "residuals",
    "loss",
    "gradients",
    "optimizer",
    "exchange",
)
"""Parts of a step that a kernel can be in; time without a kernel is "idle". experts: their grouped
products; dispatch: the router, rows gathered for experts and added up; casts: to float8."""


@dataclass(frozen=True)
class Kernel:
    """One launch. flops: of a product or of attention, else 0. product: rows, inner size, columns
    and number of equal products, or None; of experts, as if each had as many tokens. num_bytes:
    read and written in device memory. head_size: of attention. exchanged_bytes: of a collective
    over `num_ranks`. is_in_layer: in a decoder layer."""

    name: str
    part: str
    num_bytes: int
    flops: int = 0
    product: tuple[int, int, int, int] | None = None
    element_bytes: int = 2
    head_size: int = 0
    exchanged_bytes: int = 0
    num_ranks: int = 1
    is_in_layer: bool = False
    is_backward: bool = False
