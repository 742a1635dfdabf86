"""Layers that compile to something else, or again in each step, are found before a run starts."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from bigtrain.models import transformers_patches
from bigtrain.models.equivalence.compiled_layers import plan_compilation, try_compilation
from bigtrain.models.equivalence.document_isolation import find_isolation
from bigtrain.models.layers.document_attention import MASKED, NOT_ISOLATED, Isolation
from bigtrain.settings.loading import parse_run_config
from tests.support.hybrids import hybrid_config
from tests.support.run_trees import run_tree

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

DBRX: dict[str, Any] = {
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
    "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
}


def plan(model_type: str, setting: str, **values: Any) -> tuple[str, str, list[str]]:
    """Return refusal, reason and rules for a run with model.compile = `setting`."""
    model = {"config": {"model_type": model_type, **values}, "compile": setting}
    config = parse_run_config(run_tree(model=model))
    hf_config = CONFIG_MAPPING[model_type](**values)
    found, problems = plan_compilation(config, hf_config, NOT_ISOLATED)
    return found.refusal, found.reason, [f"{p.key} = {p.value} {p.rule}" for p in problems]


@pytest.mark.parametrize(
    ("model_type", "isolation"),
    [
        ("llama", Isolation("documents")),
        ("llama", NOT_ISOLATED),
        ("gemma2", MASKED),
        ("llama", Isolation("lengths")),
        pytest.param("qwen3_moe", Isolation("documents"), marks=pytest.mark.slow),
    ],
)
def test_layers_that_compile(model_type: str, isolation: Isolation) -> None:
    failure, num_graphs = try_compilation(CONFIG_MAPPING[model_type](), "auto", 4096, isolation)
    assert failure == ""
    is_recompiled = isolation.method == "lengths"  # tensors of other shapes in each micro-batch
    assert (num_graphs[-1] > num_graphs[0]) == is_recompiled


def test_layers_that_compile_to_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of a function is resumed after a graph with the functions of the original."""
    config = hybrid_config("bamba")
    isolation, _ = find_isolation(config, "auto", 24)
    assert try_compilation(config, "auto", 24, isolation)[0] == ""
    copy_function = transformers_patches._with_globals

    def with_module_name(function: Any, **names: Any) -> Any:
        copied = copy_function(function, **names)
        copied.__globals__["__name__"] = function.__globals__["__name__"]
        return copied

    monkeypatch.setattr(transformers_patches, "_with_globals", with_module_name)
    assert try_compilation(config, "auto", 24, isolation)[0].startswith("the logits differs by")


def test_experts_that_are_computed_one_by_one() -> None:
    refusal, reason, problems = plan("dbrx", "on", **DBRX)
    assert (refusal, problems) == ("", [])
    assert "of a dbrx are compiled again for other tokens" in reason
    refusal, reason, problems = plan("dbrx", "auto", **DBRX)
    assert "of a dbrx are compiled again for other tokens" in refusal
    assert (reason, problems) == ("", [])


def test_models_without_layers_of_transformers() -> None:
    rule = "a openai-gpt has no decoder layers of transformers' kind"
    values = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}
    _, _, problems = plan("openai-gpt", "on", **values)
    assert problems == [f"model.compile = on is not supported for model_type openai-gpt: {rule}"]
    assert plan("openai-gpt", "auto", **values) == (rule, "", [])
