"""Experts of any width by grouped products, as transformers' loop over them computes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from bigtrain.models.parallel import grouped_experts
from bigtrain.models.parallel.grouped_experts import PADDED, fit_experts, padded_works


def model_of(model_type: str, hidden: int, width: int) -> Any:
    config = CONFIG_MAPPING[model_type](
        vocab_size=64,
        hidden_size=hidden,
        intermediate_size=width,
        moe_intermediate_size=width,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


# gpt-oss: biases, and matrices that lie the other way round.
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize(("hidden", "width"), [(34, 10), (32, 7), (34, 16)])
def test_padded_products_are_the_loop(model_type: str, hidden: int, width: int) -> None:
    model = model_of(model_type, hidden, width)
    in_turn = copy.deepcopy(model)
    in_turn.set_experts_implementation("eager")
    fit_experts(model)
    assert model.get_experts_implementation()[""] == PADDED
    ids = torch.arange(12).view(2, 6)
    losses = [one(input_ids=ids, labels=ids, use_cache=False).loss for one in (model, in_turn)]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)
    torch.stack(losses).sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), in_turn.parameters(), strict=True):
        assert ours.grad is not None, name
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6, msg=name)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_padded_products_take_16_bit(dtype: torch.dtype) -> None:
    model = model_of("qwen3_moe", 34, 10)
    fit_experts(model)
    ids = torch.arange(12).view(2, 6)
    expected = model(input_ids=ids).logits
    logits = model.to(dtype)(input_ids=ids).logits.float()
    assert float((logits - expected).abs().max()) < 0.05 * float(expected.abs().max())


AMBIENT = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "meta device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "fake tensors": FakeTensorMode,
    "float16 by default": lambda: torch_default_dtype(torch.float16),
}


@contextmanager
def torch_default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("mode", AMBIENT.values(), ids=AMBIENT.keys())
def test_who_asks_first_does_not_decide(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    """The answer is kept for the process, and ranks must agree on it."""
    padded_works.cache_clear()
    with mode():
        assert padded_works()
    padded_works.cache_clear()
    assert padded_works()


def test_the_loop_is_left_where_padded_products_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_experts, "padded_works", lambda: False)
    model = model_of("qwen3_moe", 34, 10)
    fit_experts(model)
    assert model.get_experts_implementation()[""] == "eager"
