"""Architectures that cannot keep documents apart are found before a run starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from transformers import CONFIG_MAPPING

from bigtrain.config import RunConfig
from bigtrain.engine.resolve import resolve_run
from bigtrain.errors import ConfigError
from bigtrain.models.isolation import check_isolation
from bigtrain.run.preflight import inspect_inputs
from tests.support.datasets import write_dataset


def texts(model_type: str, attention: str, **values: Any) -> list[str]:
    config = CONFIG_MAPPING[model_type](**values)
    return [str(problem) for problem in check_isolation(config, attention)]


@pytest.mark.parametrize("attention", ["auto", "eager"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gpt2", "gemma2", "qwen3_moe"])
def test_architectures_that_isolate(model_type: str, attention: str) -> None:
    assert texts(model_type, attention) == []


@pytest.mark.parametrize("model_type", ["bloom", "falcon", "opt"])
def test_architectures_that_do_not(model_type: str) -> None:
    (problem,) = texts(model_type, "eager")
    assert problem.startswith(
        f"data.document_boundaries = 'isolate': cannot be had of model_type {model_type}: it does "
        "not: documents that share a sample have other logits than alone"
    )
    assert problem.endswith("set data.document_boundaries=ignore, or take another architecture")


def test_state_that_runs_through_is_found() -> None:
    (problem,) = texts("mamba", "eager", num_hidden_layers=2, hidden_size=64)
    assert "cannot be had of model_type mamba" in problem


def test_the_configuration_stays_as_it_was() -> None:
    config = CONFIG_MAPPING["qwen3"]()
    before = config.to_dict()
    check_isolation(config, "sdpa")
    assert config.to_dict() == before


def run_of(data: Path, model_type: str) -> dict[str, Any]:
    return {
        "model": {"config": {"model_type": model_type, "vocab_size": 50}},
        "data": {"path": str(data), "document_boundaries": "isolate"},
        "batch": {"sequence_length": 8, "global_samples": 4},
        "train": {"steps": 2},
        "optimizer": {"lr": 1e-3},
        "output": {"directory": "unused"},
    }


def test_a_run_is_refused_before_it_starts(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "d", vocab_size=50)
    inspect_inputs(resolve_run(RunConfig.model_validate(run_of(data, "llama")), 1))
    with pytest.raises(ConfigError, match=r"data\.document_boundaries = 'isolate': cannot be had"):
        inspect_inputs(resolve_run(RunConfig.model_validate(run_of(data, "bloom")), 1))


def test_flash_attention_is_refused(tmp_path: Path) -> None:
    tree = run_of(tmp_path, "llama")
    tree["model"]["attention"] = "flash_attention_2"
    with pytest.raises(ValidationError, match="cannot isolate documents"):
        RunConfig.model_validate(tree)
