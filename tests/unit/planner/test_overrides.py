"""Every setting of a run is used by a plan, or its override is an error that names the nearest."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from bigtrain.errors import ConfigError
from bigtrain.models.tracing.traced_costs import model_costs
from bigtrain.planner.constraints import FIELDS, USED, required_fields, unused_settings
from bigtrain.planner.search import Cluster
from bigtrain.planner.tables.hardware import find_device
from bigtrain.python_api.planning import _request, plan
from bigtrain.settings.loading import load_run_config
from bigtrain.settings.run_config import RunConfig
from tests.support.plan_folders import enter_folder_with_base

MODEL = {
    "model_type": "llama", "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}  # fmt: skip
RUN: dict[str, Any] = {
    "model": {"config": MODEL},
    "data": {"path": "shards"},
    "batch": {"sequence_length": 64, "global_batch_size": 32},
    "train": {"steps": 3},
    "optimizer": {"lr": 1e-3},
    "output": {"directory": "run"},
}
BASE = {"model": {"path": "base"}}
ADAPTERS = {**BASE, "adapters": {"rank": 8}}
PAIRS = {"objective": {"type": "preference"}}
OTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "parallel.tensor": ("2", {}),
    "parallel.pipeline": ("2", {}),
    "parallel.sequence": ("2", {}),
    "parallel.expert": ("2", {}),
    "batch.micro_batch_size": ("2", {}),
    "model.gradient_checkpointing": ("full", {}),
    "model.activation_offload": (
        "true", {"model": {"config": MODEL, "gradient_checkpointing": "full"}},
    ),
    "model.tiled_mlp": ("2", {}),
    "engine.deepspeed_config": ("zero3", {}),
    "model.config": (str({**MODEL, "hidden_size": 128}), {}),
    "model.overrides": ("{num_hidden_layers: 2}", {}),
    "model.attention": ("eager", {}),
    "model.frozen": ("['model.embed_tokens.*']", {}),
    "model.loss": ("plain", {}),
    "model.loss_chunk_tokens": ("7", {}),
    "model.kernels": ("liger", {}),
    "model.compile": ("off", {}),
    "precision.dtype": ("float32", {}),
    "precision.gradient_dtype": ("bfloat16", {}),
    "precision.float8": ("rowwise", {}),
    "batch.sequence_length": ("32", {}),
    "batch.global_batch_size": ("64", {}),
    "batch.global_tokens": ("4096", {"batch": {"sequence_length": 64, "global_tokens": 2048}}),
    "data.document_boundaries": ("isolate", {}),
    "data.packing": ("best_fit", {}),
    "optimizer.type": ("lion", {}),
    "optimizer.state_dtype": ("bfloat16", {}),
    "optimizer.muon.ns_steps": ("3", {"optimizer": {"lr": 1e-3, "type": "muon"}}),
    "optimizer.muon.ns_dtype": ("float32", {"optimizer": {"lr": 1e-3, "type": "muon"}}),
    "optimizer.ema": ("{decay: 0.99}", {}),
    "adapters.rank": ("4", ADAPTERS),
    "adapters.targets": ("[q_proj]", ADAPTERS),
    "adapters.modules_to_save": ("[embed_tokens]", ADAPTERS),
    "adapters.dora": ("true", ADAPTERS),
    "adapters.init": ("pissa", {**ADAPTERS, **PAIRS}),
    "adapters.quantization": ("nf4", ADAPTERS),
    "adapters.double_quantization": (
        "false", {**BASE, "adapters": {"rank": 8, "quantization": "nf4"}},
    ),
    "objective.type": ("preference", {}),
    "objective.loss": ("simpo", PAIRS),
    "objective.reference": ("scores", PAIRS),
    "objective.z_loss": ("0.1", {}),
    "objective.label_smoothing": ("0.1", {}),
    "checkpoint.asynchronous": ("false", {}),
    "checkpoint.memory": ("{every_steps: 5, copies: 0}", {}),
    "moe.bias_update_rate": ("0.001", {}),
    "guard.compare_every_steps": ("7", {"checkpoint": {"every_steps": 7, "keep_last": 4}}),
}  # fmt: skip
"""Another value of every used setting, and the sections of a run that may have it."""
NOT_TRIED = {
    "model.path": "needs weights",
    "model.type": "needs a class",
    "model.vocabulary": "needs weights",
    "adapters.type": "has one value",
    "adapters.target_parameters": "needs stacked weights",
    "objective.mtp_weight": "needs an architecture with layers for it",
    "objective.teacher_model": "needs weights",
    "sites.count": "needs a server",
    "sites.fragments": "needs a server",
    "evaluation.early_stopping": "needs held-out data",
}


def leaves(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Yield the keys of all settings."""
    for name, field in model.model_fields.items():
        annotations = (field.annotation, *typing.get_args(field.annotation))
        sections = [a for a in annotations if isinstance(a, type) and issubclass(a, BaseModel)]
        if sections:
            yield from leaves(sections[0], f"{prefix}{name}.")
        else:
            yield prefix + name


KEYS = sorted(leaves())


@pytest.fixture
def folder(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A working directory with a base; a model is traced once for all tests."""
    cache = tmp_path_factory.getbasetemp() / "overrides-cache"
    return enter_folder_with_base(tmp_path, MODEL, cache, monkeypatch)


def test_every_used_setting_is_one_of_a_run_and_has_another_value() -> None:
    assert not {key for key in USED if not any(f"{k}.".startswith(f"{key}.") for k in KEYS)}
    assert {*OTHER, *NOT_TRIED} == set(USED)


def planned(folder: Path, sections: dict[str, Any], *overrides: str) -> object:
    """What a plan depends on: model, legal layouts, and what all of them have in common."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({**RUN, **sections}))
    config = load_run_config(str(path), overrides)
    model, _ = model_costs(config)
    required = required_fields(config, overrides)
    request = _request(config, Cluster(find_device("H100"), 8, 1e12), model, required)
    section = config.model
    return (
        model, request.facts.values(), request.base, request.global_batch_size, required,
        section.loss, section.loss_chunk_tokens, section.kernels, section.compile,
        request.derived_fields(1, False, False),
    )  # fmt: skip


@pytest.mark.parametrize("key", OTHER)
def test_what_is_used_changes_what_a_plan_depends_on(folder: Path, key: str) -> None:
    value, sections = OTHER[key]
    assert unused_settings([f"{key}={value}"]) == []
    assert planned(folder, sections) != planned(folder, sections, f"{key}={value}")


@pytest.mark.parametrize("key", KEYS)
def test_what_is_not_used_names_the_nearest_that_is(key: str) -> None:
    problems = unused_settings([f"{key}=1"])
    if any(f"{key}.".startswith(f"{used}.") for used in USED):
        assert problems == []
        return
    (problem,) = problems
    assert problem.key == key
    assert problem.rule == "changes nothing in a plan"
    nearest = problem.remedy.rpartition(" ")[2]
    assert nearest in USED
    section = key.partition(".")[0]
    if any(used.startswith(f"{section}.") for used in USED):
        assert nearest.startswith(f"{section}.")


def test_sections_that_an_override_adds_or_replaces_are_used(folder: Path) -> None:
    path = folder / "run.yaml"
    lion = {"optimizer": {"lr": 1e-3, "type": "lion"}}
    path.write_text(yaml.safe_dump({**RUN, **lion}))
    replaced = plan(path, "2xH100", "optimizer={lr: 0.1}").fitting[0].layout
    assert replaced.optimizer != plan(path, "2xH100").fitting[0].layout.optimizer
    path.write_text(yaml.safe_dump({**RUN, **BASE}))
    adapted, base = (plan(path, "2xH100", *each).fitting[0] for each in (["adapters.alpha=8"], []))
    assert adapted.memory.states < base.memory.states


def test_offloaded_activations_are_of_recomputed_layers(folder: Path) -> None:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(RUN))
    layouts = [row.layout for row in plan(path, "2xH100", "model.activation_offload=true").fitting]
    assert {(each.offload_activations, each.recompute) for each in layouts} == {(True, "full")}
    with pytest.raises(ConfigError, match=r"model.gradient_checkpointing = 'none' has none"):
        plan(path, "2xH100", "model.activation_offload=true", "model.gradient_checkpointing=none")
    kept = plan(path, "2xH100", "model.activation_offload=false").fitting
    assert not any(row.layout.offload_activations for row in kept)


def test_a_plan_refuses_it_unless_it_is_written(folder: Path) -> None:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(RUN))
    told = r"train.steps = .7.: changes nothing in a plan -> .*--write"
    with pytest.raises(ConfigError, match=told):
        plan(path, "2xH100-80GB", "train.steps=7")
    with pytest.raises(ConfigError, match=r"adapters.alpha = .8.: changes nothing in a plan"):
        plan(path, "2xH100-80GB", "adapters.rank=2", "adapters.alpha=8", "model.path=base",
             "model.config=null")  # fmt: skip
    with pytest.raises(ConfigError, match=r"optimizer.lr = 0.1: changes nothing in a plan"):
        plan(path, "2xH100-80GB", "optimizer={lr: 0.1}")
    kept = plan(path, "2xH100-80GB", "train.steps=7", writes=True)
    assert kept.config.train.steps == 7
    assert set(FIELDS) <= set(USED)
