"""A run from a pretrained base that trains nothing gives it back; a changed base is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from bigtrain.cli import main as bigtrain
from tests.launch.conftest import Inputs, train
from tests.support.tiny_bases import assert_same_tensors, files_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

FROM_BASE = ("model.config=null", "train.steps=2", "optimizer.lr=1e-30", "checkpoint.every_steps=1",
             "optimizer.weight_decay=0")  # fmt: skip


@pytest.fixture
def foreign_base(base: Path, tmp_path: Path) -> Path:
    """A copy of a base with files, keys and tensors that bigtrain does not know."""
    directory = tmp_path / "foreign"
    shutil.copytree(base, directory)
    (directory / "checksums.json").unlink()
    stored = load_file(directory / "model.safetensors")
    stored["model.layers.2.eh_proj.weight"] = torch.randn(3, 3)
    # Ignored by transformers as GLM-4's layers for multi-token prediction are.
    stored |= {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    del stored["model.layers.2.eh_proj.weight"]
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    (directory / "processor_config.json").write_text('{"a": 1}')
    config = json.loads((directory / "config.json").read_text()) | {"unknown_key": [1, 2]}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_nothing_but_the_card_differs(
    foreign_base: Path,
    inputs: Inputs,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    done = train(
        *("--config", inputs.run_yaml, *FROM_BASE, f"model.path={foreign_base}"),
        *("precision.dtype=bfloat16", f"output.directory={run}"),
        *("--deepspeed_config", "zero3"),
        num_processes=2,
    )
    assert done.code == 0, done.output
    assert "these tensors are not part of the model" in done.output
    assert_same_tensors(foreign_base, run / "hf")
    before, after = files_of(foreign_base), files_of(run / "hf")
    changed = {n for n in before.keys() | after.keys() if before.get(n) != after.get(n)}
    assert changed <= {"README.md", "BASE_README.md", "checksums.json"}
    assert "tensors that transformers does not load" in (run / "log.txt").read_text()
    assert "## Changes from the base" in after["README.md"].decode()
    shutil.rmtree(run / "base")  # as of a run that an older bigtrain began
    assert bigtrain(["export", "--run", str(run), "--output", str(tmp_path / "poor")]) == 0
    assert "the run has no record of its base" in capsys.readouterr().err
    assert "has no record of its base" in (tmp_path / "poor" / "README.md").read_text()


def test_a_base_whose_configuration_changed_is_refused_at_resume(
    foreign_base: Path, inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights of a checkpoint would be those of the run, computed with another epsilon."""
    run = tmp_path / "run"
    words = ["--config", str(inputs.run_yaml), *FROM_BASE, f"model.path={foreign_base}"]
    words.append(f"output.directory={run}")
    assert train(*words).code == 0
    config = json.loads((foreign_base / "config.json").read_text())
    (foreign_base / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    longer = [*words, "train.steps=3", "checkpoint.allow_changes=[train]"]
    done = train(*longer)
    assert done.code == 2
    assert "config.json has" in done.output
    assert "base_model.json lists" in done.output
    assert bigtrain(["check", "--inputs", *longer]) == 2
    assert "base_model.json lists" in capsys.readouterr().err


def test_an_export_with_a_changed_configuration_starts_no_run(
    base: Path, inputs: Inputs, tmp_path: Path
) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(base, changed)
    text = (changed / "config.json").read_text()
    assert '"rms_norm_eps": 1e-06' in text
    (changed / "config.json").write_text(text.replace("1e-06", "1e-02"))
    run = tmp_path / "run"
    done = train(
        *("--config", inputs.run_yaml, *FROM_BASE, f"model.path={changed}"),
        f"output.directory={run}",
    )
    assert done.code == 2
    assert "config.json has" in done.output
    assert "checksums.json lists" in done.output
    assert not run.exists()


@pytest.mark.slow
def test_a_tokenizer_that_no_export_could_hold_is_refused_before_the_run(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers takes Qwen2's own class next to a Qwen2, which splits text in another way."""
    tree = {"model_type": "qwen2", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64,
            "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    words = ["--config", str(inputs.run_yaml), f"model.config={json.dumps(tree)}"]
    words.append(f"output.directory={tmp_path / 'run'}")
    assert bigtrain(["check", "--inputs", *words]) == 2
    refused = capsys.readouterr().err
    assert "reads its tokenizer as a Qwen2Tokenizer, which produces different tokens" in refused
    done = train(*words)
    assert done.code == 2
    assert "Qwen2Tokenizer" in done.output
    assert bigtrain(["check", "--inputs", *words, "output.export=false"]) == 0
    # The folder of a model may have this fault itself: its own tokenizer is no remedy then.
    base = tmp_path / "base"
    Qwen2ForCausalLM(Qwen2Config(**tree)).save_pretrained(base)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(inputs.shards / "tokenizer" / name, base / name)
    from_base = [*words[:2], *FROM_BASE, f"model.path={base}", words[-1]]
    capsys.readouterr()
    assert bigtrain(["check", "--inputs", *from_base]) == 2
    refused = capsys.readouterr().err
    assert f"{base} itself has this fault -> to train with what transformers reads: " in refused
