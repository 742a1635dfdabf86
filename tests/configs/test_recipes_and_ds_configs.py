"""Every recipe with every DeepSpeed configuration is accepted by DeepSpeed or refused by name."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from bigtrain.cli import main
from bigtrain.errors import ConfigError
from bigtrain.settings.deepspeed.engine_config import deepspeed_config_names, find_deepspeed_config
from bigtrain.settings.loading import load_run_config, recipe_names
from bigtrain.settings.resolve import ResolvedRun, resolve_run
from bigtrain.settings.run_config import RunConfig

ROOT = Path(__file__).resolve().parents[2]
DS_CONFIGS = deepspeed_config_names()
# Of one process or two: what a recipe's layout is on its own hardware is tested in test_recipes.py.
REPLICAS = [f"parallel.{kind}=1" for kind in ("tensor", "pipeline", "sequence", "expert")]
EXPECTED = {
    "zero0",
    "zero1",
    "zero2",
    "zero2_offload",
    "zero3",
    "zero3_nvme",
    "zero3_offload",
    "zeropp",
    "pipeline_zero1",
}


def autos(tree: Mapping[str, Any], parents: tuple[str, ...] = ()) -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from autos(value, (*parents, name))
        elif value == "auto":
            yield ".".join((*parents, name))


def resolved_or_refused(
    config: RunConfig, world_size: int, name: str
) -> tuple[ResolvedRun | None, str]:
    try:
        return resolve_run(config, world_size, name), ""
    except ConfigError as error:
        return None, str(error)


def test_the_promised_configurations_are_there() -> None:
    assert set(DS_CONFIGS) >= EXPECTED


def test_readme_lists_exactly_the_files() -> None:
    text = (ROOT / "ds_configs" / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([^`]+\.json)` \|", text, flags=re.MULTILINE)
    assert sorted(listed) == sorted(f"{name}.json" for name in DS_CONFIGS)


def test_key_table_is_that_of_the_installed_deepspeed() -> None:
    tool = ROOT / "tools" / "deepspeed_keys.py"
    spec = importlib.util.spec_from_file_location("deepspeed_keys_tool", tool)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert json.loads(module.TARGET.read_text(encoding="utf-8")) == module.build_table()


@pytest.mark.parametrize(
    ("dtype", "world_size"),
    [
        ("bfloat16", 2),
        *(pytest.param(t, n, marks=pytest.mark.slow) for t, n in (("float32", 1), ("float16", 2))),
    ],
)
@pytest.mark.parametrize("recipe", recipe_names())
def test_recipe_with_ds_config(recipe: str, world_size: int, dtype: str) -> None:
    config = load_run_config(recipe, [*REPLICAS, f"precision.dtype={dtype}"])
    for name in DS_CONFIGS:
        run, refusal = resolved_or_refused(config, world_size, name)
        if run is None:
            assert f"{name}.json: " in refusal or "not been compared" in refusal
        else:
            assert_taken(run, config, dtype)


def assert_taken(run: ResolvedRun, config: RunConfig, dtype: str) -> None:
    """DeepSpeed takes the run's JSON, and reads from it what the run says."""
    from deepspeed.runtime.config import DeepSpeedConfig

    given = run.engine.deepspeed
    assert list(autos(given)) == []
    accepted = DeepSpeedConfig(json.loads(json.dumps(given)))
    assert accepted.train_micro_batch_size_per_gpu == config.batch.micro_batch_size
    assert (
        accepted.train_micro_batch_size_per_gpu
        * accepted.gradient_accumulation_steps
        * run.topology.data_size
        == config.batch.samples_per_step
    )
    assert accepted.gradient_clipping == config.optimizer.clip_norm
    assert accepted.zero_optimization_stage == run.engine.zero_stage
    assert accepted.bfloat16_config.enabled == (dtype == "bfloat16")
    assert accepted.float16_config.enabled == (dtype == "float16")
    assert accepted.scheduler_name is None
    if config.optimizer.type == "adamw":
        assert accepted.optimizer_name == "adamw"
        assert accepted.optimizer_params["lr"] == config.optimizer.lr
    else:  # the engine is given it as an object
        assert accepted.optimizer_name is None


@pytest.mark.parametrize("recipe", recipe_names())
def test_what_does_nothing_or_has_not_run_is_refused(recipe: str) -> None:
    """Pipeline settings without stages; under ZeRO++ every optimizer but AdamW; adapters there and
    with parameters on NVMe."""
    config = load_run_config(recipe, REPLICAS)
    expected = {"pipeline_zero1": "pipeline_zero1.json: pipeline: the block does nothing"}
    if config.optimizer.type != "adamw":
        expected["zeropp"] = "optimizers other than AdamW have not been compared"
    if config.adapters is not None:
        expected["zero3_nvme"] = expected["zeropp"] = "adapters have not been compared"
    refused = {}
    for name in DS_CONFIGS:
        run, refusal = resolved_or_refused(config, 1, name)
        if run is None:
            refused[name] = refusal
    assert refused.keys() == expected.keys()
    for name, refusal in refused.items():
        assert expected[name] in refusal


def test_quantized_communication_is_refused_on_cpu() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_run(load_run_config("quickstart"), 2, "zeropp", "cpu")
    text = str(caught.value)
    assert "zeropp.json: zero_optimization.zero_quantized_weights = True" in text
    assert "ds_configs/zero3.json" in text


@pytest.mark.parametrize("name", DS_CONFIGS)
def test_hugging_face_trainer_takes_the_file_as_it_stands(name: str, tmp_path: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig
    from transformers import LlamaConfig, TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    class Model:
        config = LlamaConfig(hidden_size=64)

    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, learning_rate=3e-4)
    filled = HfTrainerDeepSpeedConfig(str(find_deepspeed_config(name)))
    filled.trainer_config_process(args)
    filled.trainer_config_finalize(args, Model(), num_training_steps=10)
    assert list(autos(filled.config)) == []
    assert filled.config["optimizer"]["params"]["lr"] == 3e-4
    DeepSpeedConfig(filled.config)


@pytest.mark.parametrize("name", DS_CONFIGS)
def test_accelerate_takes_the_file_as_it_stands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.utils import DeepSpeedPlugin

    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    plugin = DeepSpeedPlugin(hf_ds_config=str(find_deepspeed_config(name)))
    given = plugin.hf_ds_config
    # What Accelerator.prepare fills from the model, the loader and the launcher.
    plugin.deepspeed_config_process(
        **{
            "train_micro_batch_size_per_gpu": 2,
            "train_batch_size": 8,
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 1.0,
            "bf16.enabled": True,
            "fp16.enabled": False,
            "optimizer.params.lr": 3e-4,
            "optimizer.params.betas": [0.9, 0.999],
            "optimizer.params.eps": 1e-8,
            "optimizer.params.weight_decay": 0.0,
        }
    )
    assert list(autos(given.config)) == []


def test_check_prints_the_run_the_equation_and_the_deepspeed_dict(
    capsys: pytest.CaptureFixture[str],
) -> None:
    overrides = ["optimizer.lr=1e-4", "output.directory=new"]
    words = ("check", "--config", "quickstart", "--world-size", "2", "--resolved")
    assert main([*words, "--deepspeed-config", "zero2", *overrides]) == 0
    printed = capsys.readouterr().out
    run, engine = yaml.safe_load_all(printed)
    expected = resolve_run(load_run_config("quickstart", overrides), 2, "zero2")
    assert run == expected.config.model_dump(mode="json")
    assert run["engine"]["deepspeed_config"] == "zero2"
    assert run["optimizer"]["lr"] == 1e-4
    assert expected.plan.equation() in printed
    lines = printed.split("---\n")[1].splitlines()
    text = "\n".join(line for line in lines if line[:1] != "#")
    assert json.loads(text) == expected.engine.deepspeed
    assert engine["zero_optimization"]["stage"] == 2


def test_check_reports_every_problem_and_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("check", "--config", "quickstart", "--world-size", "3")
    overrides = ("parallel.sequence=3", "batch.global_batch_size=15")
    assert main([*words, "--deepspeed_config", "pipeline_zero1", *overrides]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("bigtrain check: 3 problems in the run with pipeline_zero1.json")
    assert "batch.global_batch_size = 15" in printed.err
    assert "batch.sequence_length = 256" in printed.err
    assert "pipeline_zero1.json: pipeline" in printed.err
