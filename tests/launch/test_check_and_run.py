"""What `bigtrain check` refuses, the run refuses with the same text, and the other way round."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from bigtrain.cli import main as bigtrain
from bigtrain.train import main as train
from tests.launch.conftest import Inputs

# Of the tiny run: two layers, positions for 64 tokens.
BROKEN = {
    "stages": (["parallel.pipeline=4"], 4, "is more than the model's 2 layers"),
    "heads": (["parallel.sequence=3", "batch.sequence_length=48"], 3, "does not divide its"),
    "positions": (["batch.sequence_length=128"], 1, "max_position_embeddings = 64"),
    "no layers": (["model.overrides={num_hidden_layers: 0}"], 1, "= 0: must be at least 1"),
    "misspelt": (["model.overrides={hidden_sise: 64}"], 1, "did you mean"),
    "not finite": (["model.overrides={rms_norm_eps: .nan}"], 1, "must be a finite number"),
    "a list": (["model.overrides={hidden_size: [64]}"], 1, "must be of JSON type integer"),
    "huge": (["parallel.sequence=100000000"], 1, "world size = 1: must be a multiple"),
    "huge world": (["parallel.sequence=100000000"], 100000000, "does not divide its"),
    "huge batch": (["batch.global_batch_size=1000000000039"], 7, "must be a multiple"),
    "true": (["train.steps=true"], 1, "train.steps = True: must be a number, not true or false"),
    "one": (["output.export=1"], 1, "output.export = 1: must be true or false"),
    "elsewhere": (["optimizer.learning_rate=1"], 1, "did you mean optimizer.lr?"),
    "derived": (["train.gradient_accumulation_steps=2"], 1, "accumulation is derived from"),
    "other section": (["optimizer.micro_batch_size=2"], 1, "did you mean batch.micro_batch_size?"),
    "rank": (["profile.ranks=[0, 2]"], 2, "profile.ranks = 2: valid ranks are 0 to 1"),
    "nowhere": (["output.directory='  '"], 1, "must name the directory of the run"),
    "no date": (["seed=2020-13-45"], 1, "month must be in 1..12"),
    "list as key": (["model.overrides={[a]: 1}"], 1, "YAML of model.overrides={[a]: 1}: "),
}


@pytest.fixture(params=["inline", "local path"])
def config(request: pytest.FixtureRequest, inputs: Inputs, tmp_path: Path) -> Path:
    """The tiny run, its model inline or in a directory."""
    tree = yaml.safe_load(inputs.run_yaml.read_text())
    if request.param == "local path":
        (tmp_path / "model").mkdir()
        (tmp_path / "model/config.json").write_text(json.dumps(tree["model"]["config"]))
        tree["model"] = {"path": str(tmp_path / "model")}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.timeout(60)
def test_both_refuse_with_one_text(
    name: str,
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # What a process of this launch has said already, it would not say again.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    changes, world_size, said = BROKEN[name]
    # An option between overrides, as train.py takes it.
    first, *others = [*changes, "seed=1"] if name != "no date" else changes
    options = ["--deepspeed_config", "zero1" if world_size != 4 else "pipeline_zero1"]
    words = ["--config", str(config), first, *options, *others]
    assert bigtrain(["check", "--world-size", str(world_size), *words]) == 2
    checked = capsys.readouterr().err.removeprefix("bigtrain check: ")
    assert said in checked
    if world_size > 1:
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", "29500")
    assert train(words) == 2
    assert capsys.readouterr().err.removeprefix("train.py: ") == checked


def test_both_accept_the_run_itself(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", "seed=3", "--config", str(config), "train.steps=5", "--world-size", "2"]
    assert bigtrain([*words, "optimizer.lr=1.0e-3"]) == 0
    shown = capsys.readouterr().out
    assert "seed: 3" in shown
    assert "steps: 5" in shown
    assert "lr: 0.001" in shown
