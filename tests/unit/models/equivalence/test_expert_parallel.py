"""Experts are divided where a proxy model shows that it changes nothing, and refused where not."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralSparseMoeBlock

from bigtrain.models.equivalence.expert_parallel import check_expert_parallel
from tests.parity.conftest import llama
from tools.tiny_models import tiny_config

SMALL = {"vocab_size": 97, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3}
MIXTRAL = llama(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2)
DEEPSEEK = SMALL | {
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}


def config_of(kind: str, **values: Any) -> PreTrainedConfig:
    config: PreTrainedConfig = CONFIG_MAPPING[kind](**values)
    return config


def problems(config: PreTrainedConfig, size: int = 2) -> list[str]:
    all_problems = check_expert_parallel(config, "auto", size, sequence_length=16)
    assert all(problem.key == "parallel.expert" for problem in all_problems)
    return [f"{problem.rule} -> {problem.remedy}" for problem in all_problems]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("mixtral", MIXTRAL),
        ("deepseek_v3", DEEPSEEK),
        ("gpt_oss", llama(head_dim=8, num_local_experts=4, num_experts_per_tok=2)),
    ],
)
def test_experts_can_be_divided(kind: str, values: dict[str, Any]) -> None:
    assert problems(config_of(kind, **{k: v for k, v in values.items() if k != "model_type"})) == []


def test_three_ranks_can_divide_six_experts() -> None:
    values = MIXTRAL | {"num_local_experts": 6}
    values.pop("model_type")
    assert problems(config_of("mixtral", **values), size=3) == []
    (text,) = problems(config_of("mixtral", **values), size=4)
    assert text == "does not divide the 6 experts of model.layers.0.mlp.experts -> nearest: 3"


def dbrx(d_model: int, n_heads: int, num_experts: int) -> PreTrainedConfig:
    return config_of(
        "dbrx",
        d_model=d_model,
        n_heads=n_heads,
        vocab_size=128,
        attn_config={"kv_n_heads": n_heads // 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        ffn_config={
            "ffn_hidden_size": 2 * d_model,
            "moe_num_experts": num_experts,
            "moe_top_k": num_experts // 4,
        },
    )


def test_experts_are_found_by_their_structure() -> None:
    assert problems(dbrx(32, 4, 4)) == []
    assert problems(dbrx(6144, 48, 16), size=4) == []  # of full width: only a proxy model is built
    (text,) = problems(dbrx(32, 4, 4), size=3)
    assert text == (
        "does not divide the 4 experts of transformer.blocks.0.ffn.experts -> nearest: 2"
    )


@pytest.mark.parametrize("kind", ["llama", "llama4_text", "jetmoe"])
def test_a_model_without_either_is_refused_by_name(kind: str) -> None:
    config = tiny_config(kind) if kind != "llama" else config_of("llama", **SMALL)
    (text,) = problems(config)
    assert text.startswith(
        f"transformers has no expert-parallel plan for model_type {kind}, and it has no modules of "
        "equally long stacks that are called with tokens, their experts and weights -> "
    )


def weighted_first(self: Any, hidden: Any, chosen: Any, weights: Any) -> Any:
    return EXPERTS_FORWARD(self, hidden * weights.sum(-1, keepdim=True), chosen, weights)


def squared(self: Any, hidden: Any, chosen: Any, weights: Any) -> Any:
    return EXPERTS_FORWARD(self, hidden, chosen, weights.square())


def decayed(self: Any, hidden: Any) -> Any:
    return BLOCK_FORWARD(self, hidden) + 1e-2 * self.experts.down_proj.sum()


EXPERTS_FORWARD, BLOCK_FORWARD = MixtralExperts.forward, MixtralSparseMoeBlock.forward


@pytest.mark.parametrize(
    ("owner", "forward", "is_refused"),
    [
        (MixtralExperts, weighted_first, False),  # the weights are normalized: their sum is 1
        (MixtralExperts, squared, True),
        (MixtralSparseMoeBlock, decayed, True),
    ],
)
def test_experts_that_ranks_would_compute_otherwise_are_refused(
    owner: Any, forward: Any, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "forward", forward)
    values = {key: value for key, value in MIXTRAL.items() if key != "model_type"}
    texts = problems(config_of("mixtral", **values))
    assert ["expert parallelism changes the loss" in text for text in texts] == [True] * is_refused
