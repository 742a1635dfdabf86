"""What a run asks of routers is refused where the architecture has no such thing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from bigtrain.models.equivalence.expert_parallel import _run_proxy, check_expert_balance
from tests.support.run_trees import run_config

GLOBAL = {"auxiliary_loss": "global_batch"}
Z_LOSS = {"z_loss_coefficient": 0.01}
BIAS = {"bias_update_rate": 0.01}
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.01}
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": None,
}
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
}


BIASED: tuple[dict[str, Any], ...] = (
    {
        "model_type": "lfm2_moe",
        "layer_types": ["conv", "full_attention"],
        "num_dense_layers": 1,
        "num_experts": 4,
        "moe_intermediate_size": 16,
    },
    {"model_type": "ernie4_5_moe", "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1},
)
"""With biases of several names, as buffers and as parameters without a gradient."""


def problems(moe: dict[str, Any], model: dict[str, Any]) -> list[str]:
    config = run_config(model={"config": model}, moe=moe)
    values = {**SMALL, **model}
    hf_config = CONFIG_MAPPING[values.pop("model_type")](**values)
    return [f"{p.key}: {p.rule}" for p in check_expert_balance(config, hf_config)]


@pytest.mark.parametrize(
    ("moe", "model"),
    [
        ({}, {"model_type": "llama"}),
        (GLOBAL | Z_LOSS, MIXTRAL | ROUTED),
        (Z_LOSS, MIXTRAL),
        (BIAS, DEEPSEEK),
        *((BIAS, dict(model)) for model in BIASED),
    ],
)
def test_what_a_model_has_is_allowed(moe: dict[str, Any], model: dict[str, Any]) -> None:
    assert problems(moe, model) == []


@pytest.mark.parametrize(
    ("moe", "model", "said"),
    [
        (GLOBAL, MIXTRAL, "moe.auxiliary_loss: the mixtral has no auxiliary loss, or it is off"),
        (
            GLOBAL,
            DEEPSEEK | ROUTED,
            "moe.auxiliary_loss: a deepseek_v3 returns no auxiliary loss",
        ),
        (
            Z_LOSS,
            {"model_type": "llama"},
            "moe.z_loss_coefficient: a llama: the model returns no router logits",
        ),
        (
            BIAS,
            {"model_type": "llama"},
            "moe.bias_update_rate: the routers of a llama have no bias by which tokens choose "
            "experts",
        ),
    ],
)
def test_what_it_has_not_is_refused(moe: dict[str, Any], model: dict[str, Any], said: str) -> None:
    assert problems(moe, model) == [said]


def test_a_bias_that_does_not_decide_the_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3

    router: Any = modeling_deepseek_v3.DeepseekV3TopkRouter
    own = router.forward

    def forward(self: Any, hidden_states: Any) -> Any:
        bias = self.e_score_correction_bias
        self.e_score_correction_bias = torch.zeros_like(bias)
        outputs = own(self, hidden_states)
        self.e_score_correction_bias = bias
        return outputs

    monkeypatch.setattr(router, "forward", forward)
    (problem,) = problems(BIAS, DEEPSEEK)
    assert "is not a bias by which tokens choose experts" in problem


def test_another_formula_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.mixtral import modeling_mixtral

    own = modeling_mixtral.load_balancing_loss_func
    monkeypatch.setattr(
        modeling_mixtral, "load_balancing_loss_func", lambda *args: 1.01 * own(*args)
    )
    (problem,) = problems(GLOBAL, MIXTRAL | ROUTED)
    assert "computes another auxiliary loss" in problem


def test_the_router_is_tried_beyond_the_windows_of_the_run() -> None:
    values = {**SMALL, **MIXTRAL, "sliding_window": 4096}
    config = CONFIG_MAPPING[values.pop("model_type")](**values)
    _, model = _run_proxy(config, "auto", 8192)
    assert model.config.sliding_window == 13
