"""A trial is made once; what depends on anything else is another trial."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, PreTrainedConfig

from bigtrain.models.configuration import load_hf_config
from bigtrain.models.equivalence import cache_key, model_plan
from bigtrain.models.equivalence.cache_key import trial_key
from bigtrain.models.equivalence.model_plan import cached_model_plan, choose
from bigtrain.models.layers import kernels
from bigtrain.settings.fast_path import ANY_CUDA
from bigtrain.settings.resolve import resolve_run
from bigtrain.settings.run_config import RunConfig
from bigtrain.settings.sections.adapters import AdaptersSection
from bigtrain.system import user_cache
from tests.support.run_trees import run_tree

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
GEMMA = {**LLAMA, "model_type": "gemma3_text", "head_dim": 8, "sliding_window": 16}
GPT = {"model_type": "openai-gpt", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}


def run_of(
    architecture: dict[str, Any], world_size: int, **sections: Any
) -> tuple[RunConfig, Any, Any]:
    batch = {"sequence_length": 32, "global_batch_size": 4, "micro_batch_size": 1}
    tree = run_tree(model={"config": architecture}, batch=batch)
    for section, values in sections.items():
        tree[section] = {**tree.get(section, {}), **values}
    config = RunConfig.model_validate(tree)
    return config, load_hf_config(config.model), resolve_run(config, world_size, "zero1").plan


CASES = {
    "plain": (LLAMA, 1, {}),
    "stages of two kinds of layers": (GEMMA, 2, {"parallel": {"pipeline": 2}}),
    "sequence": (LLAMA, 2, {"parallel": {"sequence": 2}}),
    "documents": (LLAMA, 1, {"data": {"document_boundaries": "isolate"}}),
    "chunks": (LLAMA, 1, {"model": {"loss": "chunked", "loss_chunk_tokens": 7}}),
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIGTRAIN_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in ("sequence", "chunks")))
        for name in CASES
    ],
)
def test_what_is_kept_is_what_was_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, world_size, sections = CASES[name]
    run = run_of(model, world_size, **sections)
    expected, problems = choose(*run)
    assert problems == []
    assert cached_model_plan(*run) == (expected, [])
    monkeypatch.setattr(model_plan, "choose", None)  # is not called again
    assert cached_model_plan(*run) == (expected, [])


def test_a_compiler_and_terms_of_the_loss_make_another_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A compiled loss takes chunks, and is only of plain cross-entropies."""
    config, hf_config, plan = run_of(LLAMA, 1)

    def loss_kind(config: RunConfig) -> str:
        model_plan, problems = cached_model_plan(config, hf_config, plan)
        assert model_plan is not None
        assert problems == []
        return model_plan.loss.kind

    assert loss_kind(config) == "plain"
    monkeypatch.setattr(kernels, "may_compile", lambda _section: True)
    monkeypatch.setattr(kernels, "machine_of", lambda _device_type: ANY_CUDA)
    assert loss_kind(config) == "chunked"
    with_z_loss = config.objective.model_copy(update={"z_loss": 1e-4})
    assert loss_kind(config.model_copy(update={"objective": with_z_loss})) == "plain"


@pytest.mark.parametrize(
    ("values", "key", "fix"),
    [
        ({"hidden_act": "gellu"}, "model.config.hidden_act", "did you mean gelu?"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": "big"}},
            "model.config.rope_parameters.rope_theta",
            "a number or a name of transformers",
        ),
    ],
)
def test_a_value_with_which_the_code_fails_is_named(
    values: dict[str, Any], key: str, fix: str
) -> None:
    found, (problem,) = choose(*run_of({**LLAMA, **values}, 1))
    assert found is None
    assert (problem.key, problem.remedy) == (key, fix)


def test_a_refusal_is_not_kept(tmp_path: Path) -> None:
    run = run_of(GPT, 1, data={"document_boundaries": "isolate"})
    expected = choose(*run)
    assert expected[1]
    for _ in range(2):
        assert cached_model_plan(*run) == expected
    assert list((tmp_path / "cache" / "trials").rglob("*.*")) == []


def test_every_setting_is_another_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[str] = []
    found: list[dict[str, Any]] = []

    def note(_kind: str, key: str, find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        keys.append(key)
        found.append(found[0] if found else find())  # which is no matter here
        return found[0]

    monkeypatch.setattr(model_plan, "cached", note)
    sections: list[dict[str, Any]] = [
        {},
        {"data": {"document_boundaries": "isolate"}},
        {"data": {"document_boundaries": "isolate", "packing": "best_fit"}},
        {"batch": {"sequence_length": 16}},
        {"batch": {"micro_batch_size": 2}},
        {"model": {"loss": "chunked"}},
        {"model": {"attention": "eager"}},
        {"model": {"config": {**LLAMA, "hidden_size": 64}}},
        {"precision": {"dtype": "float32"}},
    ]
    for changed in sections:
        cached_model_plan(*run_of(LLAMA, 1, **changed))
    assert len(set(keys)) == len(keys) == len(sections)
    cached_model_plan(*run_of(LLAMA, 1, optimizer={"lr": 1e-4}))  # no trial depends on it
    assert keys[-1] == keys[0]
    monkeypatch.setattr(cache_key, "package_source", lambda: b"another bigtrain")
    cached_model_plan(*run_of(LLAMA, 1))
    assert keys[-1] not in keys[:-1]


@pytest.mark.parametrize("library", ["torch", "transformers", "peft", "bitsandbytes"])
def test_another_library_or_processor_is_another_trial(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = trial_key(LlamaConfig(), "x")
    monkeypatch.setattr(
        user_cache, "_fingerprint", lambda name: f"{name} {'2' if name == library else '1'}"
    )
    changed = trial_key(LlamaConfig(), "x")
    monkeypatch.setattr(user_cache, "_fingerprint", lambda name: f"{name} 1")
    keys = {before, changed, trial_key(LlamaConfig(), "x")}
    monkeypatch.setattr(cache_key, "processor", lambda: "flags: amx_bf16")
    assert len(keys | {trial_key(LlamaConfig(), "x")}) == 4


def test_adapters_are_another_trial() -> None:
    config, hf_config, plan = run_of(LLAMA, 1)
    assert cached_model_plan(config, hf_config, plan)[1] == []
    adapters = AdaptersSection(targets=("no_such_layer",))
    changed = config.model_copy(update={"adapters": adapters})
    assert cached_model_plan(changed, hf_config, plan)[1] != []


def test_a_model_of_foreign_code_is_tried_every_time() -> None:
    class Foreign(LlamaConfig):
        pass

    class Unknown(PreTrainedConfig):
        pass

    assert trial_key(LlamaConfig(), "x") is not None
    assert trial_key(Foreign(), "x") is None
    assert trial_key(Unknown(), "x") is None
