"""Fused operations move what is in memory between kernels, and autograd keeps it instead of what is
inside of one."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, MixtralConfig

from bigtrain.models.tracing.fusion import Dataflow, FusedSums
from bigtrain.models.tracing.meta_trace import trace_model
from bigtrain.planner.model_costs import DenseShape, LayerCosts, closed_form


def add(flow: Dataflow, name: str, inputs: str, outputs: str) -> None:
    """An operation on tensors of 10 bytes, which are called by letters."""
    flow.add(
        name, {ord(i): 10 for i in inputs}, {ord(o): 10 for o in outputs},
        is_product=name == "mm", is_divided=False, is_in_mlp=False,
    )  # fmt: skip


def sums_of(flow: Dataflow, saved: str) -> FusedSums:
    for letter in saved:
        flow.save(ord(letter), 10, is_divided=False, is_in_mlp=False)
    return flow.sums({ord("w")})


def test_operations_between_products_are_one_kernel() -> None:
    """A norm of x: a cast, a square, a product of both: reads x and a weight, writes y."""
    flow = Dataflow()
    for name, inputs, outputs in (
        ("to", "x", "a"), ("pow", "a", "b"), ("mul", "ab", "c"), ("mul", "cw", "y"),
        ("mm", "yv", "z"),
    ):  # fmt: skip
        add(flow, name, inputs, outputs)
    sums = sums_of(flow, "abcy")
    assert sums.moved_replicated == 30  # x, w, y
    # The norm's input instead of three tensors inside, and the product's input.
    assert sums.saved_replicated == 20
    assert sums.num_kernels == 2


def test_a_branch_that_waits_for_a_product_is_not_fused_with_what_is_before_it() -> None:
    """h = x + o, n = f(h), u = n W, out = h + u: h and n are written by one kernel, and h is read
    again after the product."""
    flow = Dataflow()
    for name, inputs, outputs in (
        ("mm", "xw", "o"), ("add", "xo", "h"), ("f", "h", "n"), ("mm", "nw", "u"),
        ("add", "hu", "r"),
    ):  # fmt: skip
        add(flow, name, inputs, outputs)
    sums = sums_of(flow, "n")
    assert sums.moved_replicated == (10 + 10 + 10 + 10) + (10 + 10 + 10)
    assert sums.saved_replicated == 10


def test_an_activation_is_fused_across_a_product_that_it_does_not_wait_for() -> None:
    """silu(gate) is computed before the product that makes up: both are one level."""
    flow = Dataflow()
    for name, inputs, outputs in (
        ("mm", "xw", "g"), ("silu", "g", "s"), ("mm", "xw", "u"), ("mul", "su", "c"),
        ("mm", "cw", "d"),
    ):  # fmt: skip
        add(flow, name, inputs, outputs)
    sums = sums_of(flow, "gsuc")
    assert sums.moved_replicated == 30  # g, u and c
    assert sums.saved_replicated == 30


def test_what_has_kernels_of_its_own_is_moved_as_before() -> None:
    flow = Dataflow()
    for name, inputs, outputs in (("exp", "x", "a"), ("topk", "a", "b"), ("exp", "b", "c")):
        add(flow, name, inputs, outputs)
    assert sums_of(flow, "").moved_replicated == 60


def test_a_layer_is_counted_as_by_hand() -> None:
    """Llama's layer in 16 bits. Kept: the inputs of two norms and of all products, queries, keys,
    values and output of attention, and gate and up. Moved: two norms, of which the second adds the
    residual, rotary embeddings, SwiGLU, and the last residual."""
    shape = DenseShape(2, 64, 4, 2, 160, 96)
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=160,
        vocab_size=96, num_hidden_layers=2,
    )  # fmt: skip
    (traced,) = trace_model(config, torch.bfloat16, 128).kinds
    fused = traced.fused
    assert fused is not None
    saved = 2 * (4 * 64 + (64 + 32 + 32 + 64) + 3 * 160)
    log_sums = 4 * 4
    assert fused.saved_bytes_whole + fused.saved_bytes_cut == saved + log_sums
    moved = 2 * ((2 + 4 + 3) * 64 + 2 * (64 + 32) + 3 * 160)
    assert fused.moved_bytes_whole + fused.moved_bytes_cut == pytest.approx(moved, rel=0.03)
    assert traced.saved_bytes_whole + traced.saved_bytes_cut > 1.3 * saved
    (by_hand,) = closed_form(shape).with_fused_operations.kinds
    assert by_hand.moved_bytes_whole + by_hand.moved_bytes_cut == moved


def test_the_operations_around_grouped_products_are_fused() -> None:
    """Of a layer with experts: the norm before the router, the activation between grouped products
    and the weighted sum of a token's experts, so that both halves of the layer move less."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 96, "vocab_size": 96, "num_hidden_layers": 2}
    config = MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)
    (single,) = trace_model(config, torch.bfloat16, 128).kinds
    fused = single.with_fused_operations()
    assert single.mlp.num_parameters_expert > 0

    def moved(layer: LayerCosts) -> tuple[float, float]:
        """Return the bytes per token of the experts and of the rest of the layer."""
        total = layer.moved_bytes_whole + layer.moved_bytes_cut
        return total * layer.mlp.moved, total * (1 - layer.mlp.moved)

    assert all(less < more for less, more in zip(moved(fused), moved(single), strict=True))
    assert fused.num_kernels < single.num_kernels
