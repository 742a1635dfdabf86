"""Every token of a forward pass in training is counted, once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig

from bigtrain.models.experts import ExpertCounts

NAME = "model.layers.0.mlp.experts"
CPU = torch.device("cpu")


def model_of() -> Any:
    config = MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).train()


def run(model: Any) -> None:
    ids = torch.arange(12).view(2, 6)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


@pytest.mark.parametrize("recompute", [False, True])
def test_each_token_counts_once_for_each_of_its_experts(recompute: bool) -> None:
    model = model_of()
    if recompute:
        model.activation_checkpointing_enable({"use_reentrant": False})
    expected = choices_of(model)
    assert int(expected.sum()) == 24
    counts = ExpertCounts(model)
    assert counts.num_experts == {NAME: 4}
    counts.begin(counting=True)
    run(model)
    assert torch.equal(counts.of(NAME, CPU), expected)
    run(model)
    assert torch.equal(counts.of(NAME, CPU), 2 * expected)
    counts.begin(counting=True)
    assert not counts.of(NAME, CPU).any()


def choices_of(model: Any) -> torch.Tensor:
    choices = []
    block = model.model.layers[0].mlp
    hook = block.experts.register_forward_pre_hook(lambda _m, inputs: choices.append(inputs[1]))
    with torch.no_grad():
        model(input_ids=torch.arange(12).view(2, 6), use_cache=False)
    hook.remove()
    return torch.bincount(choices[0].flatten(), minlength=4)


def test_nothing_else_is_counted() -> None:
    model = model_of()
    counts = ExpertCounts(model)
    run(model)
    counts.begin(counting=True)
    model.eval()
    run(model)
    assert not counts.of(NAME, CPU).any()
    model.train()
    counts.begin(counting=False)
    run(model)
    assert not counts.of(NAME, CPU).any()
    counts.begin(counting=True)
    counts.close()
    run(model)
    assert not counts.of(NAME, CPU).any()


def test_what_is_no_expert_is_left_out() -> None:
    """Some routers send a token to what leaves it as it is, beyond the experts."""
    model = model_of()
    counts = ExpertCounts(model)
    counts.begin(counting=True)
    experts = model.model.layers[0].mlp.experts
    experts.forward = lambda hidden, **_: hidden
    chosen = torch.tensor([[0, 5], [3, 4]])
    experts(torch.zeros(2, 16), top_k_index=chosen, top_k_weights=torch.ones(2, 2))
    assert counts.of(NAME, CPU).tolist() == [1, 0, 0, 1]
