"""Files of public repositories, as they were found, become runs that compute the same, or are
refused by the keys that change the mathematics.

`public_files.json` has their keys and values; ``refused``: keys that are refused; ``omit``: keys
without which the run is written, absent where it is not; ``settings``: of the run, which the file
leaves open and without which it is refused; ``task``: TRL's trainer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from bigtrain.errors import ConfigError
from bigtrain.settings.conversion.convert import Conversion, convert
from bigtrain.settings.lr_schedule import learning_rate_at
from bigtrain.settings.resolve import resolve_run

FILES: Mapping[str, Any] = json.loads(
    Path(__file__).with_name("public_files.json").read_text(encoding="utf-8")
)
RUNNING = [name for name, file in FILES.items() if "omit" in file]
WORLD_SIZE = 8
STEPS = 200


def converted(
    name: str, directory: Path, omitted: list[str], settings: Sequence[str] = ()
) -> Conversion:
    """Return the run of a file, which is refused as a run too, by ConfigError. A tokenizer that is
    not here is replaced by a number of rows."""
    path = directory / "found.yaml"
    path.write_text(yaml.safe_dump(FILES[name]["keys"], sort_keys=False), encoding="utf-8")
    task = FILES[name].get("task")
    has_rows = not name.startswith(("EleutherAI", "NVIDIA")) or any(
        key.endswith("vocab_size") for key in FILES[name]["keys"]
    )
    conversion = convert(
        [path],
        world_size=WORLD_SIZE,
        task=task,
        omitted=omitted,
        overrides=[*settings, *([] if has_rows else ["model.config.vocab_size=50432"])],
    )
    resolve_run(conversion.config, WORLD_SIZE)
    return conversion


def keys_of(error: ConfigError) -> set[str]:
    keys = {problem.key for problem in error.problems} - {"all of these", "the command"}
    return {"" if key.endswith("found.yaml") else key for key in keys}


def test_there_are_many_files_of_each_trainer() -> None:
    assert len(FILES) >= 40
    assert len(RUNNING) >= 30
    owners = {name.partition("/")[0] for name in FILES}
    assert owners >= {"axolotl-ai-cloud", "hiyouga", "huggingface", "EleutherAI"}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_refused_by_what_changes_the_mathematics(name: str, tmp_path: Path) -> None:
    file = FILES[name]
    if not file["refused"]:
        converted(name, tmp_path, [])
        return
    with pytest.raises(ConfigError) as caught:
        converted(name, tmp_path, [])
    assert keys_of(caught.value) == set(file["refused"])
    for problem in caught.value.problems:
        assert problem.remedy, problem
    if "omit" in file:
        conversion = converted(name, tmp_path, file["omit"], file.get("settings", []))
        for key in file["omit"]:
            given = key.partition(".")[0] == key and file["keys"].get(key) is not None
            assert not given or any(note.startswith(f"{key} = ") for note in conversion.notes)


@pytest.mark.parametrize("name", RUNNING)
def test_every_key_is_used_or_listed(name: str, tmp_path: Path) -> None:
    """A key that is in no note has a setting: another value of it makes another run."""
    settings = FILES[name].get("settings", [])
    conversion = converted(name, tmp_path, FILES[name]["omit"], settings)
    text = json.dumps(conversion.tree)
    for key, setting in (
        ("learning_rate", "lr"),
        ("weight_decay", "weight_decay"),
        ("lora_r", "rank"),
        ("lora_rank", "rank"),
        ("output_dir", "directory"),
    ):
        value = FILES[name]["keys"].get(key)
        if value is not None and key not in FILES[name]["omit"]:
            number = float(value) if key != "output_dir" else value
            assert f'"{setting}": {json.dumps(number)}' in text or f'"{setting}": {value}' in text


def factors_of_transformers(keys: Mapping[str, Any], default: str, directory: Path) -> list[float]:
    """Return the factors of the learning rate of STEPS steps, by transformers' own scheduler."""
    import torch
    from transformers import TrainingArguments, get_scheduler

    kind = keys.get("lr_scheduler_type", keys.get("lr_scheduler", default))
    warmup = keys.get("warmup_steps") or keys.get("warmup_ratio") or 0
    arguments = TrainingArguments(
        output_dir=str(directory), use_cpu=True, lr_scheduler_type=kind, warmup_steps=warmup
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_scheduler(
        kind,
        optimizer,
        arguments.get_warmup_steps(STEPS),
        STEPS,
        scheduler_specific_kwargs=keys.get("lr_scheduler_kwargs"),
    )
    factors = []
    for _ in range(STEPS):
        optimizer.step()
        scheduler.step()
        factors.append(scheduler.get_last_lr()[0])
    return factors


OF_TRAINER = [name for name in RUNNING if not name.startswith(("EleutherAI", "NVIDIA"))]


@pytest.mark.parametrize("name", OF_TRAINER)
def test_learning_rates_and_batch_are_those_of_the_trainer(name: str, tmp_path: Path) -> None:
    file = FILES[name]
    keys = {key: value for key, value in file["keys"].items() if key not in file["omit"]}
    config = converted(name, tmp_path, file["omit"]).config
    default = "cosine" if name.startswith("axolotl") else "linear"
    expected = factors_of_transformers(keys, default, tmp_path)
    rates = [
        learning_rate_at(step, config.optimizer.lr, config.schedule, STEPS) / config.optimizer.lr
        for step in range(STEPS)
    ]
    assert rates == pytest.approx(expected, abs=1e-9)
    micro = keys.get("micro_batch_size", keys.get("per_device_train_batch_size", 8))
    if name.startswith("axolotl"):
        micro = keys.get("micro_batch_size", 1)
    accumulation = keys.get("gradient_accumulation_steps", 1)
    assert config.batch.samples_per_step == micro * accumulation * WORLD_SIZE
    assert config.optimizer.betas == (keys.get("adam_beta1", 0.9), keys.get("adam_beta2", 0.999))
    assert config.optimizer.weight_decay == keys.get("weight_decay", 0.0)
    assert config.optimizer.clip_norm == keys.get("max_grad_norm", 1.0)


def neox_rate(keys: Mapping[str, Any], step: int) -> float:
    """Return the learning rate of update `step`, from 1, by GPT-NeoX's AnnealingLR
    (megatron/learning_rates.py at ea7aefd8)."""
    import math

    lr, least = float(keys["optimizer"]["params"]["lr"]), float(keys.get("min_lr", 0.0))
    end = keys.get("lr_decay_iters", keys["train_iters"])
    warmup = int(end * keys.get("warmup", 0.01))
    if warmup and step <= warmup:
        return lr * step / warmup
    progress = min(step - warmup, end - warmup) / (end - warmup)
    if keys.get("lr_decay_style", "linear") == "linear":
        return max(least, lr * (1 - progress))
    return least + (lr - least) * 0.5 * (math.cos(math.pi * progress) + 1.0)


@pytest.mark.parametrize("name", [name for name in RUNNING if name.startswith("EleutherAI")])
def test_a_neox_file_has_its_model_and_its_first_learning_rates(name: str, tmp_path: Path) -> None:
    keys = {key.replace("-", "_"): value for key, value in FILES[name]["keys"].items()}
    config = converted(name, tmp_path, FILES[name]["omit"]).config
    model = config.model.config
    assert isinstance(model, dict)
    assert model["num_hidden_layers"] == keys["num_layers"]
    assert model["hidden_size"] == keys["hidden_size"]
    assert model["tie_word_embeddings"] == (not keys.get("no_weight_tying", False))
    if keys.get("norm") == "rmsnorm":
        assert model["model_type"] == "llama"
        assert model["num_key_value_heads"] == keys.get("num_kv_heads", keys["num_attention_heads"])
    else:
        assert model["use_parallel_residual"] == keys.get("gpt_j_residual", False)
        assert model["rope_parameters"]["partial_rotary_factor"] == keys.get("rotary_pct", 1.0)
        fused = keys.get("bias_gelu_fusion", False)
        assert model["hidden_act"] == ("gelu_pytorch_tanh" if fused else "gelu")
    if keys.get("init_method") == "small_init":
        assert model["initializer_range"] == pytest.approx((0.4 / keys["hidden_size"]) ** 0.5)
    total = config.train.total_steps
    assert total == keys["train_iters"]
    warmup = config.schedule.count_warmup_steps(total)
    for step in (0, 1, warmup - 1, warmup, warmup + 5, total // 2, total - 2):
        rate = learning_rate_at(step, config.optimizer.lr, config.schedule, total)
        assert rate == pytest.approx(neox_rate(keys, step + 1), rel=1e-3)
