"""Models that see later tokens are refused; causal ones are not, of whatever kind."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from bigtrain.models.equivalence.causality import check_causality
from bigtrain.models.equivalence.model_plan import try_model
from bigtrain.settings.run_config import RunConfig
from tests.support.run_trees import run_tree
from tools.tiny_models import tiny_config


def refusal(model_type: str, **changes: Any) -> str:
    config = tiny_config(model_type)
    for name, value in changes.items():
        setattr(config, name, value)
    problems = check_causality(config, "auto", 64, "model.path")
    return str(problems[0]) if problems else ""


@pytest.mark.parametrize(
    "model_type",
    ["llama", "gemma3", "bert", "roberta", "electra", "bamba", "mamba", "mixtral", "zaya", "rwkv"],
)
def test_a_causal_model_is_not_refused(model_type: str) -> None:
    assert refusal(model_type) == ""


def test_xlm_is_causal_where_its_configuration_says_so() -> None:
    assert refusal("xlm", causal=True) == ""


@pytest.mark.parametrize(
    ("model_type", "changes", "remedy"),
    [
        ("bert", {"is_decoder": False}, "-> model.overrides.is_decoder=true"),
        ("roberta", {"is_decoder": False}, "-> model.overrides.is_decoder=true"),
        ("roformer", {"is_decoder": False}, "-> model.overrides.is_decoder=true"),
        ("xlm", {}, "-> model.overrides.causal=true"),
        ("xlnet", {}, "-> a model with causal attention"),
        ("cpmant", {}, "-> a model with causal attention"),
    ],
)
def test_a_model_that_sees_later_tokens_is_refused(
    model_type: str, changes: dict[str, Any], remedy: str
) -> None:
    text = refusal(model_type, **changes)
    assert text.startswith(f"model.path = '{model_type}': a {model_type} with this configuration")
    assert text.endswith(remedy)


def test_a_run_refuses_it_before_it_starts() -> None:
    values = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = CONFIG_MAPPING["bert"](intermediate_size=32, vocab_size=64, **values)
    run = RunConfig.model_validate(run_tree())
    problems, _, _ = try_model(run, config)
    assert [problem.key for problem in problems] == ["model.config"]
    config.is_decoder = True
    assert try_model(run, config)[0] == []
