"""DeepSpeed JSONs of public repositories, as they were found, run or are refused for a reason that
holds.

`public_jsons.json` has their keys and values; ``refused`` names the keys that are refused, with a
part of each reason. The run has the values that the JSON sets for it (batch, optimizer, precision),
as the run YAML of a user who brings the file does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bigtrain.errors import ConfigError
from bigtrain.settings.batch_plan import BatchPlan
from bigtrain.settings.deepspeed.engine_config import read_deepspeed_config, render
from bigtrain.settings.deepspeed.keys import AUTO, key_table, value_at
from bigtrain.settings.run_config import RunConfig
from tests.support.run_trees import run_config

FILES: Mapping[str, Any] = json.loads(
    Path(__file__).with_name("public_jsons.json").read_text(encoding="utf-8")
)


def chosen(raw: Mapping[str, Any], path: str, default: Any) -> Any:
    """Return the value that the JSON sets for the run; `default` where it leaves it to the run."""
    value = value_at(raw, path, AUTO)
    return default if value == AUTO else value


def run_of(raw: Mapping[str, Any]) -> tuple[RunConfig, BatchPlan]:
    """Return a run with the values that `raw` has for it, and its plan for the number of ranks with
    which they agree."""
    micro_batch_size = chosen(raw, "train_micro_batch_size_per_gpu", 1)
    accumulation = chosen(raw, "gradient_accumulation_steps", 1)
    batch_size = chosen(raw, "train_batch_size", micro_batch_size * accumulation)
    num_ranks = batch_size // (micro_batch_size * accumulation)
    plan = BatchPlan(batch_size, micro_batch_size, num_ranks, accumulation, 8)
    defaults = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    optimizer = {
        name: chosen(raw, f"optimizer.params.{name}", value) for name, value in defaults.items()
    }
    precision: dict[str, Any] = {"dtype": "float32"}
    if chosen(raw, "bf16.enabled", False):
        precision = {"dtype": "bfloat16"}
    if chosen(raw, "fp16.enabled", False):
        power = chosen(raw, "fp16.initial_scale_power", 16)
        precision = {"dtype": "float16", "initial_loss_scale_power": power}
    config = run_config(
        precision=precision,
        optimizer={**optimizer, "clip_norm": chosen(raw, "gradient_clipping", 1.0)},
        batch={"global_batch_size": batch_size, "micro_batch_size": micro_batch_size},
    )
    return config, plan


@pytest.mark.parametrize("name", FILES)
def test_a_public_file_runs_or_is_refused_for_a_reason_that_holds(
    name: str, tmp_path: Path
) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    path = tmp_path / "found.json"
    path.write_text(json.dumps(FILES[name]["json"]), encoding="utf-8")
    raw = read_deepspeed_config(path)
    config, plan = run_of(raw)
    engine, problems = render(config, plan, raw, "found.json")
    reasons = {problem.key.removeprefix("found.json: "): problem.rule for problem in problems}
    expected: Mapping[str, str] = FILES[name].get("refused", {})
    assert reasons.keys() == expected.keys(), reasons
    for key, reason in expected.items():
        assert reason in reasons[key]
    if engine is not None:
        assert AUTO not in json.dumps(engine.deepspeed)
        accepted = DeepSpeedConfig(json.loads(json.dumps(engine.deepspeed)))
        assert accepted.zero_optimization_stage == chosen(raw, "zero_optimization.stage", 0)


def test_most_files_run() -> None:
    running = [name for name in FILES if not FILES[name].get("refused")]
    assert len(running) >= 40
    assert len({name.partition(":")[0] for name in FILES}) >= 10


FIELDS = [
    (alias, node["field"])
    for alias, node in key_table()["keys"]["zero_optimization"]["keys"].items()
    if "field" in node
]


@pytest.mark.parametrize(("alias", "field"), FIELDS)
def test_a_field_name_is_its_alias(alias: str, field: str, tmp_path: Path) -> None:
    """DeepSpeed takes both names of a key for the same; given twice, it would take one of them."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    types = key_table()["keys"]["zero_optimization"]["keys"][alias]["types"]
    value = True if types == ["boolean"] else 7
    by_field = DeepSpeedZeroConfig(**{"stage": 3, field: value})
    assert by_field == DeepSpeedZeroConfig(**{"stage": 3, alias: value})
    path = tmp_path / "found.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3, field: value}}))
    assert read_deepspeed_config(path) == {"zero_optimization": {"stage": 3, alias: value}}
    path.write_text(json.dumps({"zero_optimization": {field: value, alias: value}}))
    with pytest.raises(ConfigError, match=f"{field}: is another name of {alias}, which is given"):
        read_deepspeed_config(path)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ({"bfloat16": {"enabled": True}}, {"bf16": {"enabled": True}}),
        ({"zero_optimization": True}, {"zero_optimization": {"stage": 1}}),
        (
            {"zero_optimization": {"cpu_offload": True, "cpu_offload_param": False}},
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
        ),
        (
            {"zero_optimization": {"stage3_gather_fp16_weights_on_model_save": True}},
            {"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": True}},
        ),
    ],
)
def test_former_names_are_read_as_deepspeed_reads_them(
    written: dict[str, Any], read: dict[str, Any], tmp_path: Path
) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    path = tmp_path / "found.json"
    path.write_text(json.dumps(written))
    assert read_deepspeed_config(path) == read
    batch = {"train_micro_batch_size_per_gpu": 1}
    as_written = DeepSpeedConfig({**batch, **written})
    as_read = DeepSpeedConfig({**batch, **read})
    assert as_written.bfloat16_config == as_read.bfloat16_config
    for name in (
        "stage",
        "offload_optimizer",
        "offload_param",
        "gather_16bit_weights_on_model_save",
    ):
        assert getattr(as_written.zero_config, name) == getattr(as_read.zero_config, name), name


AUTOS = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}


@pytest.mark.parametrize(
    ("raw", "note"),
    [
        ({"_comment": "mine"}, "_comment is a comment"),
        ({"//": ["two", "lines"]}, "// is a comment"),
        ({"zero_optimization": {"_why": "x"}}, "zero_optimization._why is a comment"),
        ({"tensorboard": {"enabled": False, "job_name": "x"}}, "tensorboard is off"),
        ({"autotuning": {"enabled": False, "fast": True}}, "autotuning is off"),
        ({"compile": {"deepcompile": False}}, "compile is off"),
        (
            {"activation_checkpointing": {"partition_activations": False, "profile": False}},
            "activation_checkpointing is off",
        ),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": AUTOS}},
            "schedule.* of the run is used",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {**AUTOS, "warmup_min_lr": 0}}},
            "scheduler (WarmupLR) has no values of its own: schedule.* of the run is used",
        ),
    ],
)
def test_what_is_not_passed_to_deepspeed_is_said(raw: dict[str, Any], note: str) -> None:
    config, plan = run_of(raw)
    engine, problems = render(config, plan, raw, "x.json")
    assert problems == []
    assert engine is not None
    [line] = engine.notes
    assert line.startswith("x.json: ")
    assert note in line
    bare, _ = render(config, plan, {}, "x.json")
    assert bare is not None
    assert engine.deepspeed == bare.deepspeed


@pytest.mark.parametrize(
    ("raw", "rule"),
    [
        ({"_comment": {"stage": 3}}, "unknown key"),
        ({"_stage": 3}, "unknown key"),
        ({"scheduler": {"type": "WarmupLR"}}, "the run owns the learning rate over time"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {**AUTOS, "warmup_num_steps": 500}}},
            "the run owns the learning rate over time",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {**AUTOS, "warmup_type": "log"}}},
            "the run owns the learning rate over time",
        ),
        ({"compile": {"disable": False, "backend": "inductor"}}, "the run owns compilation"),
        ({"tensorboard": {"enabled": True}}, "is DeepSpeed's monitor"),
        ({"tensorboard": {}}, "is DeepSpeed's monitor"),
    ],
)
def test_what_has_an_effect_is_one_problem(raw: dict[str, Any], rule: str) -> None:
    config, plan = run_of({})
    _, [problem] = render(config, plan, raw, "x.json")
    assert rule in problem.rule


@pytest.mark.parametrize(
    ("params", "rule"),
    [
        ({"bias_correction": True, "amsgrad": False}, None),
        ({"adam_w_mode": True}, None),
        ({"adam_w_mode": False}, "contradicts optimizer.type = adamw"),
        ({"bias_correction": False}, "contradicts optimizer.type = adamw"),
        ({"max_grad_norm": 1.0}, "is refused by DeepSpeed"),
    ],
)
def test_adam_of_deepspeed_is_adamw(params: dict[str, Any], rule: str | None) -> None:
    config, plan = run_of({})
    raw = {"optimizer": {"type": "Adam", "params": params}}
    engine, problems = render(config, plan, raw, "x.json")
    if rule is not None:
        [problem] = problems
        assert rule in problem.rule
        return
    assert engine is not None
    assert engine.deepspeed["optimizer"]["type"] == "AdamW"


def test_the_parameters_of_another_optimizer_are_one_problem() -> None:
    config, plan = run_of({})
    raw = {"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 400, "cuda_aware": False}}}
    _, [problem] = render(config, plan, raw, "x.json")
    assert problem.key == "x.json: optimizer.type"
