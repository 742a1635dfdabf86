"""Which MLPs a run computes in tiles, and what it refuses or leaves as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from bigtrain.models.equivalence.tiles import choose_tiles
from bigtrain.models.layers.parameter_roles import collapsed
from bigtrain.models.layers.plans import TilePlan
from bigtrain.settings.batch_plan import BatchPlan
from tests.support.run_trees import run_config
from tests.unit.models.layers.test_chunked_loss import COMMON

PLAN = BatchPlan(4, 4, 1, 1, 16)
"""Micro-batches of 64 tokens; the hidden size is 32."""


def choose(
    wanted: int | str,
    model_type: str = "llama",
    float32_names: tuple[str, ...] = (),
    adapters: dict[str, Any] | None = None,
    **values: Any,
) -> tuple[TilePlan, list[str]]:
    config = run_config(model={"path": "unused", "tiled_mlp": wanted}, adapters=adapters)
    common = {name: value for name, value in COMMON.items() if name != "head_dim"}
    chosen, problems = choose_tiles(
        config, CONFIG_MAPPING[model_type](**{**common, **values}), PLAN, float32_names
    )
    return chosen, [str(problem) for problem in problems]


def test_a_number_of_tiles() -> None:
    chosen, problems = choose(5)
    assert problems == []
    assert chosen.modules == ("model.layers.0.mlp", "model.layers.1.mlp")
    assert chosen.tile_tokens == 13
    assert chosen.reason == "MLPs: 2 in 5 tiles of 13 tokens (64 tokens, hidden size 32)"
    assert choose("off") == (TilePlan(), [])


def test_auto_takes_tiles_as_long_as_the_hidden_size() -> None:
    chosen, problems = choose("auto")
    assert (chosen.tile_tokens, len(chosen.modules), problems) == (32, 2, [])
    chosen, problems = choose("auto", hidden_size=28, num_attention_heads=7, num_key_value_heads=7)
    assert (chosen.tile_tokens, len(chosen.modules), problems) == (22, 2, [])  # three tiles
    chosen, problems = choose("auto", hidden_size=64)
    assert chosen == TilePlan(reason="MLPs: not in tiles (64 tokens, hidden size 64)")
    assert problems == []


def test_more_tiles_than_tokens_are_refused() -> None:
    assert choose(65)[1] == [
        "model.tiled_mlp = 65: is more than the 64 tokens of a rank's micro-batch -> "
        "model.tiled_mlp=64"
    ]


def test_an_architecture_without_mlps_is_refused() -> None:
    values = {"word_embed_proj_dim": 32, "ffn_dim": 64}
    reason = "its MLPs are not modules of their own inside decoder layers"
    assert choose(2, "opt", **values)[1] == [
        f"model.tiled_mlp = 2: is not supported for model_type opt: {reason} -> model.tiled_mlp=off"
    ]
    chosen, problems = choose("auto", "opt", **values)
    assert (chosen.modules, problems) == ((), [])
    assert chosen.reason == f"MLPs: not in tiles, which are not supported for opt: {reason}"


def test_an_mlp_that_mixes_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    own = LlamaMLP.forward

    def mixing(self: Any, x: torch.Tensor) -> torch.Tensor:
        return own(self, x) + x.mean(-2, keepdim=True)

    monkeypatch.setattr(LlamaMLP, "forward", mixing)
    (problem,) = choose(2)[1]
    assert problem.startswith(
        "model.tiled_mlp = 2: is not supported for model_type llama: the loss differs by"
    )
    assert choose("auto")[0].modules == ()


def test_experts_of_another_contract_are_refused() -> None:
    """Llama 4's experts get the tokens of all experts in one dimension."""
    (problem,) = choose(2, "llama4_text", num_local_experts=4, intermediate_size_mlp=32)[1]
    assert problem.startswith("model.tiled_mlp = 2: is not supported for model_type llama4_text: ")


def test_stacks_of_experts_with_adapters_are_refused() -> None:
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    adapters: dict[str, Any] = {"rank": 2, "targets": "mlp"}
    (problem,) = choose(2, "qwen3_moe", adapters=adapters, **moe)[1]
    assert "model.layers.0.mlp.experts.gate_up_proj is a stack of experts with adapters" in problem
    adapters["targets"] = "attention"
    chosen, problems = choose(2, "qwen3_moe", adapters=adapters, **moe)
    assert problems == []
    assert collapsed(chosen.modules) == ["model.layers.*.mlp.experts"]


def test_mlps_with_parameters_of_another_dtype_are_not_in_tiles() -> None:
    chosen, problems = choose(2, float32_names=("model.layers.0.mlp.up_proj.weight",))
    assert (chosen.modules, problems) == (("model.layers.1.mlp",), [])
    kept = tuple(f"model.layers.{n}.mlp.up_proj.weight" for n in range(2))
    assert "its MLPs are kept in float32" in choose(2, float32_names=kept)[1][0]
