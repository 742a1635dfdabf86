"""Averages of the weights (``optimizer.ema``) of a run: exported, begun and ended by a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import AutoModelForCausalLM

import bigtrain
from bigtrain.cli import main
from bigtrain.errors import CheckpointError
from tests.launch.conftest import Inputs, inputs, run_tree
from tests.support.lives import run_script
from tests.support.worlds import ROOT

__all__ = ["inputs"]
pytestmark = pytest.mark.distributed
WORKER = ROOT / "tests/launch/extension_worker.py"
DECAY, STEPS = 0.8, 6


@pytest.fixture(scope="module")
def run(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with averages in 6 steps, under ZeRO 3."""
    folder = tmp_path_factory.mktemp("averages")
    tree = run_tree(inputs.shards, folder / "run")
    tree["optimizer"] |= {"ema": {"decay": DECAY}}
    tree["checkpoint"] = {"every_steps": 1, "keep_last": 20, "allow_changes": ["train.steps"]}
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    train(folder, 2, STEPS, "engine.deepspeed_config=zero3")
    return folder / "run"


def train(folder: Path, world_size: int, steps: int, *more: str) -> None:
    words = ("--config", "run.yaml", f"train.steps={steps}", "output.export=false", *more)
    run_script(world_size, WORKER, folder, *words)


@pytest.mark.slow
def test_the_export_has_the_weights_of_an_averaged_model(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "average"
    words = ["--run", str(run), "--step", str(STEPS), "--output", str(output)]
    assert main(["export", *words, "--average", "--dtype", "float32"]) == 0
    exported = AutoModelForCausalLM.from_pretrained(output)
    model = AutoModelForCausalLM.from_config(exported.config)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for step in range(1, STEPS + 1):
        model.load_state_dict(bigtrain.load_state_dict(run, step=step), strict=False)
        averaged.update_parameters(model)
    for name, tensor in averaged.module.named_parameters():
        assert torch.equal(exported.get_parameter(name), tensor), name
        assert not torch.equal(model.get_parameter(name), tensor), name
    card = (output / "README.md").read_text()
    assert "The weights are a moving average (decay 0.8 per update)." in card


@pytest.mark.slow
def test_a_resume_reports_averages_that_begin_end_or_change(run: Path, tmp_path: Path) -> None:
    """The checkpoint of the step without them is not exported as an average."""
    for steps, setting in enumerate(
        ("optimizer.ema=null", "seed=3", "optimizer.ema.decay=0.9"), STEPS + 1
    ):
        train(run.parent, 1, steps, setting)
    with pytest.raises(CheckpointError, match="--average: it has no averages of the weights"):
        bigtrain.export_run(run, tmp_path / "average", step=STEPS + 1, average=True)
    assert not (tmp_path / "average").exists()
    lines = [line for line in (run / "log.txt").read_text().splitlines() if "optimizer.ema" in line]
    texts = (
        "optimizer.ema is off: the checkpoint's averages of the weights are not continued",
        "optimizer.ema: the checkpoint has no averages of the weights; they begin with the "
        f"weights of step {STEPS + 1}",
        "optimizer.ema.decay: 0.8 in the checkpoint, 0.9 from now on",
    )
    assert len(lines) == len(texts)
    for line, text in zip(lines, texts, strict=True):
        assert text in line
