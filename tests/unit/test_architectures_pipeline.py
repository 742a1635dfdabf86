"""Every causal LM of the installed transformers, in pipeline stages and whole."""

from __future__ import annotations

import pytest

from tools.architectures_pipeline import attempt, sweep


@pytest.mark.parametrize("model_type", ["falcon", "mamba", "deepseek_v4", "glm_moe_dsa", "bart"])
def test_a_sample_is_exact(model_type: str) -> None:
    assert attempt(model_type) == ("exact", "")


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [("hrm_text", "no list of layers"), ("inkling2_text", "is given more of the layers before it")],
)
def test_what_cannot_be_cut_is_refused(model_type: str, reason: str) -> None:
    result, said = attempt(model_type)
    assert result == "refused"
    assert reason in said


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_none_is_wrong() -> None:
    outcomes = sweep([])
    assert len(outcomes) > 150
    assert [name for name, (result, _) in outcomes.items() if result == "wrong"] == []
    exact = [name for name, (result, _) in outcomes.items() if result == "exact"]
    assert len(exact) > 100
