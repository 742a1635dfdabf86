"""Which parameters Muon takes, by the kind of module and not by name."""

from __future__ import annotations

from typing import Any

import pytest

from bigtrain.models.build import empty_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.parallel.hidden_matrices import check_matrices, hidden_matrices, matrices_of
from bigtrain.settings.run_config import ModelSection, OptimizerSection
from bigtrain.settings.sections.optimizer import MuonSection, SplitSection
from tools.tiny_models import tiny_config

SMALL = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
ATTENTION = {f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkvo"}
STACKS = {f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")}


def model_of(**values: Any) -> Any:
    return empty_model(load_hf_config(ModelSection(config=SMALL | values)))


@pytest.mark.parametrize("tied", [True, False])
def test_neither_embeddings_nor_head_norms_or_biases(tied: bool) -> None:
    model = model_of(model_type="qwen2", tie_word_embeddings=tied)
    mlp = {f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    assert hidden_matrices(model).keys() == ATTENTION | mlp


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("mixtral", {"num_local_experts": 4}),
        ("gpt_oss", {"num_local_experts": 4, "head_dim": 8}),
    ],
)
def test_experts_and_no_router(model_type: str, more: dict[str, Any]) -> None:
    matrices_by_name = hidden_matrices(model_of(model_type=model_type, **more))
    assert matrices_by_name.keys() == ATTENTION | STACKS
    is_transposed = model_type == "gpt_oss"
    assert matrices_by_name["model.layers.0.mlp.experts.down_proj"].output_dim == (
        2 if is_transposed else 1
    )


@pytest.mark.parametrize("groups", [1, 4])
def test_a_grouped_layer_is_a_matrix_for_each_group(groups: int) -> None:
    config = tiny_config("deepseek_v4")
    config.o_groups, config.o_lora_rank = groups, 8
    name = "model.layers.0.self_attn.o_a_proj.weight"
    hidden = hidden_matrices(empty_model(config))[name]
    matrices = matrices_of([hidden], {})
    width = config.num_attention_heads * config.head_dim // groups
    assert [matrix.shape for matrix in matrices] == [(8, width)] * groups
    starts = [matrix.boxes[0].offsets for matrix in matrices]
    assert starts == [(8 * group, 0) for group in range(groups)]
    (whole,) = matrices_of([hidden], {"*.o_a_proj.weight": SplitSection(parts=1)})
    assert whole.shape == (8 * groups, width)


@pytest.mark.parametrize("width", [8, 16])
def test_experts_that_transformers_has_not_marked(width: int) -> None:
    """Llama 4's are [experts, in, out], also where widths are alike, and its router is linear."""
    more = {"intermediate_size": width, "num_local_experts": 4, "head_dim": 8}
    matrices_by_name = hidden_matrices(model_of(model_type="llama4_text", **more))
    experts = "model.layers.0.feed_forward.experts."
    stacks = {f"{experts}{name}" for name in ("gate_up_proj", "down_proj")}
    shared = {n for n in matrices_by_name if ".shared_expert." in n}
    assert matrices_by_name.keys() == ATTENTION | stacks | shared
    assert len(shared) == 3
    assert {matrices_by_name[name].output_dim for name in stacks} == {2}


def test_a_router_around_a_linear_layer() -> None:
    """DBRX's experts lie in one matrix, and are no stacks."""
    matrices_by_name = hidden_matrices(empty_model(tiny_config("dbrx")))
    assert {name.partition("norm_attn_norm.")[2] for name in matrices_by_name} == {
        "attn.Wqkv.weight",
        "attn.out_proj.weight",
    }


def test_a_router_that_is_a_linear_layer_and_a_gate_of_one_row() -> None:
    more = {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    matrices_by_name = hidden_matrices(model_of(model_type="qwen2_moe", **more))
    shared = {f"model.layers.0.mlp.shared_expert.{n}_proj.weight" for n in ("gate", "up", "down")}
    assert matrices_by_name.keys() == ATTENTION | STACKS | shared


def test_conv1d_lies_the_other_way_round() -> None:
    values = {"model_type": "gpt2", "vocab_size": 48, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = empty_model(load_hf_config(ModelSection(config=values)))
    matrices_by_name = hidden_matrices(model)
    assert {name.partition("h.0.")[2] for name in matrices_by_name} == {
        "attn.c_attn.weight",
        "attn.c_proj.weight",
        "mlp.c_fc.weight",
        "mlp.c_proj.weight",
    }
    assert matrices_by_name["transformer.h.0.attn.c_attn.weight"].output_dim == 1


def test_frozen_matrices_are_left_out() -> None:
    model = model_of(model_type="llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" not in name)
    assert "model.layers.0.self_attn.q_proj.weight" not in hidden_matrices(model)


@pytest.mark.parametrize(
    ("split", "words"),
    [
        ({"*.qkv.weight": {"parts": 3}}, "matches the name of no matrix"),
        ({"*.q_proj.weight": {"parts": 3}}, "do not add up to the 16 output features"),
        ({"*.q_proj.weight": {"parts": [8, 4]}}, "widths whose sum is 16"),
        ({"*.q_proj.weight": {"parts": 2, "interleaved": 3}}, "interleaved 3 times"),
    ],
)
def test_splits_that_do_not_fit(split: dict[str, Any], words: str) -> None:
    section = OptimizerSection(type="muon", lr=1e-3, muon=MuonSection(split=split))
    problems = check_matrices(model_of(model_type="llama"), section)
    assert len(problems) == 1
    assert words in str(problems[0])


def test_a_model_without_a_hidden_matrix() -> None:
    model = model_of(model_type="llama")
    for parameter in model.model.layers.parameters():
        parameter.requires_grad_(False)
    (problem,) = check_matrices(model, OptimizerSection(type="muon", lr=1e-3))
    assert "nothing of this model that is trained" in str(problem)
