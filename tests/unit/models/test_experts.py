"""Every token of a forward pass in training is counted, once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, MixtralConfig

from bigtrain.models.experts import COUNTED, ExpertCounts
from bigtrain.models.layers.compilation import compile_layers

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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_layers_count_between_two_graphs(recompute: bool) -> None:
    """The same tokens, and the same gradients; nothing is compiled after the first step."""
    torch._dynamo.reset()
    counters.clear()
    previous_backend = torch.compiler.get_default_backend()
    torch.compiler.set_default_backend("aot_eager_decomp_partition")
    models = [model_of(), model_of()]
    for model in models:
        if recompute:
            model.activation_checkpointing_enable({"use_reentrant": False})
    compile_layers(models[1], divided=True)
    plain, compiled = ExpertCounts(models[0]), ExpertCounts(models[1], is_compiled=True)
    try:
        for is_counting in (True, False, True):
            for model, counts in zip(models, (plain, compiled), strict=True):
                counts.begin(counting=is_counting)
                model.zero_grad()
                run(model)
            assert bool(plain.of(NAME, CPU).any()) is is_counting
            assert torch.equal(compiled.of(NAME, CPU), plain.of(NAME, CPU))
            for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
                assert torch.allclose(ours.grad, theirs.grad, rtol=0, atol=1e-6)
            assert counters["stats"]["unique_graphs"] == 2
    finally:
        torch.compiler.set_default_backend(previous_backend)
    (reason,) = counters["graph_break"]
    assert COUNTED in reason
    compiled.close()
    run(models[1])
    assert torch.equal(compiled.of(NAME, CPU), plain.of(NAME, CPU))


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
