"""Which experts ZeRO 3 cannot gather, by what they do and not by name."""

from __future__ import annotations

import pytest

from bigtrain.models.equivalence.expert_parallel import check_expert_gathering
from tools.tiny_models import tiny_config


@pytest.mark.parametrize("model_type", ["dbrx", "longcat_flash"])
def test_loops_over_chosen_experts_are_refused(model_type: str) -> None:
    config = tiny_config(model_type)
    (problem,) = check_expert_gathering(config, 3, 2, 16)
    assert problem.key == "zero_optimization.stage"
    assert f"which experts of a {model_type} are computed, in a loop" in problem.rule
    assert check_expert_gathering(config, 2, 2, 16) == []
    assert check_expert_gathering(config, 3, 1, 16) == []


@pytest.mark.parametrize("model_type", ["llama", "llama4_text", "mixtral", "deepseek_v3", "jetmoe"])
def test_other_models_can_be_gathered(model_type: str) -> None:
    assert check_expert_gathering(tiny_config(model_type), 3, 2, 16) == []
