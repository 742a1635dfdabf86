"""Every layout of a plan is the layout of the run that the plan writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from bigtrain.errors import ConfigError
from bigtrain.planner.tables.hardware import find_device
from bigtrain.python_api.planning import plan, predicted_run
from bigtrain.settings.resolve import resolve_run
from bigtrain.settings.run_config import RunConfig
from tests.support.plan_folders import enter_folder_with_base

MODEL = {
    "model_type": "llama", "vocab_size": 2000, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}  # fmt: skip
EXPERTS = {
    **MODEL, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "head_dim": 16,
}  # fmt: skip
RUN: dict[str, Any] = {
    "model": {"config": MODEL},
    "data": {"path": "shards"},
    "batch": {"sequence_length": 128, "global_batch_size": 32},
    "train": {"steps": 3},
    "optimizer": {"lr": 1e-3},
    "precision": {"dtype": "bfloat16"},
    "output": {"directory": "run"},
}
ADAPTERS = {"model": {"path": "base"}, "adapters": {"rank": 2}}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "16 bits": ("4xH100-80GB", {}),
    "16 bits, two nodes": ("16xH100-80GB", {"checkpoint": {"memory": {"every_steps": 3}}}),
    "copies on hosts": ("4xH100-80GB", {"checkpoint": {"memory": {"every_steps": 3}}}),
    "32 bits": ("4xCPU", {"precision": {"dtype": "float32"}}),
    "gradients in 16 bits": (
        "4xH100-80GB", {"precision": {"dtype": "bfloat16", "gradient_dtype": "bfloat16"}},
    ),
    "chunks": ("2xCPU", {"model": {"config": MODEL, "loss": "chunked", "compile": "off"}}),
    "small chunks": ("4xH100-80GB", {"model": {"config": MODEL, "loss_chunk_tokens": 300}}),
    "small chunks by operators": (
        "4xH100-80GB",
        {"model": {"config": MODEL, "loss_chunk_tokens": 300}, "objective": {"z_loss": 0.1}},
    ),
    "Liger": ("2xH100-80GB", {"model": {"config": MODEL, "loss": "liger", "kernels": "liger"}}),
    "tiles and offload": (
        "4xH100-80GB",
        {"model": {"config": MODEL, "tiled_mlp": 4, "activation_offload": True,
                   "gradient_checkpointing": "full"}},
    ),
    "pairs": (
        "4xA100-40GB",
        {"model": {"config": MODEL, "loss_chunk_tokens": 300, "compile": "off"},
         "objective": {"type": "preference"}},
    ),
    "pairs with adapters": ("4xH100-80GB", {**ADAPTERS, "objective": {"type": "preference"}}),
    "answers with adapters": ("4xH100-80GB", {**ADAPTERS, "objective": {"type": "kto"}}),
    "scores": ("4xH100-80GB", {"objective": {"type": "reward"}}),
    "teacher": (
        "4xH100-80GB", {"objective": {"type": "distillation", "teacher_model": "base"}},
    ),
    "experts": ("4xH100-80GB", {"model": {"config": EXPERTS}}),
    "balanced experts": (
        "4xH100-80GB", {"model": {"config": EXPERTS}, "moe": {"bias_update_rate": 1e-3}},
    ),
}  # fmt: skip


@pytest.fixture
def folder(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A working directory with a base; a model is traced once for all tests."""
    cache = tmp_path_factory.getbasetemp() / "written-cache"
    return enter_folder_with_base(tmp_path, MODEL, cache, monkeypatch)


def differences(folder: Path, gpus: str, sections: dict[str, Any], *overrides: str) -> list[str]:
    """Layouts, of every fifth line of a plan, whose written run is predicted otherwise."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({**RUN, **sections}))
    found, different = plan(path, gpus, *overrides), []
    device = find_device(gpus.partition("x")[2])
    for number in range(1, len(found.fitting) + 1, 5):
        tree, engine = found.run_tree(number)
        json_path = folder / "engine.json"
        json_path.write_text(json.dumps(engine))
        config = RunConfig.model_validate(tree)
        run = resolve_run(config, found.cluster.num_devices, str(json_path))
        row, (prediction, _) = found.fitting[number - 1], predicted_run(run, device)
        rate = prediction.tokens_per_second
        if prediction.memory != row.memory or rate != pytest.approx(row.tokens_per_second):
            different.append(f"{row.describe()}: {row.memory} is {prediction.memory}")
    return different


@pytest.mark.parametrize("name", RUNS)
def test_a_written_run_is_predicted_as_its_line(folder: Path, name: str) -> None:
    assert differences(folder, *RUNS[name]) == []


def test_a_teacher_takes_memory_and_time(folder: Path) -> None:
    path = folder / "run.yaml"
    objective = {"type": "distillation", "teacher_model": "base"}
    path.write_text(yaml.safe_dump({**RUN, "objective": objective}))
    rows = plan(path, "2xA100-40GB").fitting
    assert all(row.memory.teacher > 0 and row.time.teacher > 0 for row in rows)
    assert {row.layout.pipeline_size for row in rows} == {1}
    with pytest.raises(ConfigError, match=r"objective.teacher_model = 'none/': .*of the teacher"):
        plan(path, "2xA100-40GB", "objective.teacher_model=none/")


def test_a_reference_is_computed_without_stages_unless_they_are_asked_for(folder: Path) -> None:
    """Stages read stored scores, which the run without stages does not need."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({**RUN, **ADAPTERS, "objective": {"type": "preference"}}))
    layouts = [row.layout for row in plan(path, "4xH100-80GB").fitting]
    assert {layout.pipeline_size for layout in layouts} == {1}
    assert {layout.num_reference_rows for layout in layouts} == {2}
    (staged, *_) = plan(path, "4xH100-80GB", "parallel.pipeline=2").fitting
    assert (staged.layout.pipeline_size, staged.layout.num_reference_rows) == (2, 0)


JSONS: dict[str, dict[str, Any]] = {
    "automatic": {"stage": 2, "reduce_bucket_size": "auto", "allgather_bucket_size": "auto"},
    "of floats": {"stage": 1, "reduce_bucket_size": 2e7, "allgather_bucket_size": 3e7},
    "overlapping": {"stage": 2, "overlap_comm": True},
    "offloading": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}


@pytest.mark.parametrize("name", JSONS)
def test_a_named_json_is_read_as_a_run_reads_it(folder: Path, name: str) -> None:
    path = folder / "mine.json"
    path.write_text(json.dumps({"zero_optimization": JSONS[name]}))
    assert differences(folder, "4xH100-80GB", {}, f"engine.deepspeed_config={path}") == []


def test_the_batch_of_a_json_holds_the_layouts(folder: Path) -> None:
    path = folder / "mine.json"
    batch = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    path.write_text(json.dumps({**batch, "zero_optimization": {"stage": 1}}))
    override = f"engine.deepspeed_config={path}"
    assert differences(folder, "4xH100-80GB", {}, override) == []
    layouts = [row.layout for row in plan(folder / "run.yaml", "4xH100-80GB", override).fitting]
    assert {(layout.micro_batch_size, layout.num_accumulation) for layout in layouts} == {(2, 4)}
    told = r"train_micro_batch_size_per_gpu = 2: contradicts batch.micro_batch_size = 4"
    with pytest.raises(ConfigError, match=told):
        plan(folder / "run.yaml", "4xH100-80GB", override, "batch.micro_batch_size=4")


@pytest.mark.parametrize(
    ("zero", "told"),
    [
        ([3], "zero_optimization = .3.: must be a block"),
        ({"stage": "auto"}, "zero_optimization.stage = 'auto'"),
        ({"stage": 9}, "zero_optimization.stage = 9: must be one of"),
        ({"stage": 2, "reduce_bucket_size": None}, "reduce_bucket_size: must be of JSON type"),
        ({"stage": 2, "reduce_bucket_size": -1}, "reduce_bucket_size = -1: must be more than 0"),
        ({"stage": 2, "offload_param": {"device": "cpu"}}, "only ZeRO 3 partitions parameters"),
    ],
)
def test_a_json_that_a_run_refuses_is_refused(folder: Path, zero: object, told: str) -> None:
    path = folder / "mine.json"
    path.write_text(json.dumps({"zero_optimization": zero}))
    (folder / "run.yaml").write_text(yaml.safe_dump(RUN))
    with pytest.raises(ConfigError, match=told):
        plan(folder / "run.yaml", "4xH100-80GB", f"engine.deepspeed_config={path}")


def test_sections_that_a_run_refuses_are_refused(folder: Path) -> None:
    path = folder / "run.yaml"
    sections = {"objective": {"type": "kto"}, "data": {"path": "shards", "packing": "best_fit"}}
    path.write_text(yaml.safe_dump({**RUN, **ADAPTERS, **sections}))
    with pytest.raises(ConfigError, match=r"data.packing = 'best_fit': "):
        plan(path, "4xH100-80GB")
