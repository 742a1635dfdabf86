"""Which layers compute in float8, and that each product is torchao's own to the last bit."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from bigtrain.models.build import empty_model
from bigtrain.models.layers import float8
from bigtrain.models.layers.float8 import check_float8, float8_product, plan_float8

torchao = pytest.importorskip("torchao.float8")
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def config_of(model_type: str, **sizes: Any) -> PretrainedConfig:
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    return AutoConfig.for_model(model_type, **(shape | heads | sizes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_product_equals_torchaos_layer(recipe: Any, dtype: torch.dtype) -> None:
    from torchao.float8.float8_linear import Float8Linear

    torch.manual_seed(0)
    layer = nn.Linear(64, 96, bias=False, dtype=dtype)
    config = replace(torchao.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    theirs = Float8Linear.from_float(copy.deepcopy(layer), config=config)
    x = torch.randn(2, 32, 64, dtype=dtype, requires_grad=True)
    y, gradient = x.detach().clone().requires_grad_(), torch.randn(2, 32, 96, dtype=dtype)
    own = float8_product(recipe, is_emulated=True)(x, layer.weight)
    expected = theirs(y)
    own.backward(gradient)
    expected.backward(gradient)
    assert torch.equal(own, expected)
    assert torch.equal(x.grad, y.grad)
    assert torch.equal(layer.weight.grad, theirs.weight.grad)
    assert not torch.allclose(own, nn.functional.linear(x, layer.weight), rtol=1e-3)


def test_frozen_weight_gets_no_gradient_and_is_saved_itself() -> None:
    weight = nn.Parameter(torch.randn(32, 16), requires_grad=False)
    x = torch.randn(16, 16, requires_grad=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        output = float8_product("tensorwise", is_emulated=True)(x, weight)
    # ZeRO 3 frees a parameter by its data; a saved view would keep the gathered tensor.
    assert [t.shape for t in saved] == [x.shape, weight.shape]
    output.sum().backward()
    assert weight.grad is None
    assert x.grad is not None


def test_head_embeddings_and_routers_stay() -> None:
    config = config_of("qwen2_moe", num_experts=4, moe_intermediate_size=32)
    plan, problems = plan_float8(empty_model(config), "tensorwise", 1, 32)
    assert not problems
    kinds = {name.split(".", 3)[3] for name in plan.names}
    assert kinds == {
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *(f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")),
    }


def test_widths_that_a_rank_cannot_multiply_stay_and_are_named() -> None:
    model = empty_model(config_of("llama", num_key_value_heads=1))  # keys and values 16 wide
    whole, _ = plan_float8(model, "tensorwise", 1, 32)
    cut, _ = plan_float8(model, "tensorwise", 2, 32)
    assert len(whole.names) - len(cut.names) == 4
    assert "4 stay as they are, whose widths are no multiples of 32 (k_proj, v_proj)" in cut.reason


@pytest.mark.parametrize(
    ("sizes", "tokens", "rule"),
    [
        ({}, 40, "micro-batches of a multiple of 32 tokens on a rank, not 40"),
        ({"hidden_size": 40}, 32, "widths that are multiples of 32"),
    ],
)
def test_refuses_what_blocks_do_not_fit(sizes: dict[str, int], tokens: int, rule: str) -> None:
    _, [problem] = plan_float8(empty_model(config_of("llama", **sizes)), "mxfp8", 1, tokens)
    assert problem.key == "precision.float8"
    assert rule in problem.rule


def test_refuses_a_gpu_without_the_products_and_a_missing_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "L40S")
    [problem] = check_float8("rowwise")
    assert "needs compute capability 9.0, and L40S has 8.9" in problem.rule
    assert problem.remedy == "precision.float8=tensorwise"
    assert not check_float8("tensorwise")
    monkeypatch.setattr(float8.importlib.util, "find_spec", lambda name: None)
    [problem] = check_float8("tensorwise")
    assert "torchao" in problem.remedy
