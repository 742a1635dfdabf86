"""`bigtrain merge`: the mean of checkpoints that were written by different topologies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import bigtrain
from bigtrain.cli import main
from bigtrain.errors import CheckpointError, ConfigError, ModelError
from tests.launch.conftest import Inputs, inputs, run_tree
from tests.support.lives import run_script
from tests.support.worlds import ROOT

__all__ = ["inputs"]
pytestmark = pytest.mark.distributed
WORKER = ROOT / "tests/launch/extension_worker.py"


@pytest.fixture(scope="module")
def run(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 4 (two ranks of ZeRO 3), 8 and 12 (one rank)."""
    import yaml

    folder = tmp_path_factory.mktemp("merged")
    tree = run_tree(inputs.shards, folder / "run") | {"train": {"steps": 12}}
    tree["checkpoint"] = {"every_steps": 4, "keep_last": 3, "allow_changes": ["train.steps"]}
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    for world_size, steps, more in (
        (2, 4, ["engine.deepspeed_config=zero3"]),
        (1, 12, []),
    ):
        words = ("--config", "run.yaml", f"train.steps={steps}", "output.export=false", *more)
        run_script(world_size, WORKER, folder, *words)
    return folder / "run"


def mean_of(run: Path, shares: dict[int, float]) -> dict[str, torch.Tensor]:
    states = {step: bigtrain.load_state_dict(run, step=step) for step in shares}
    total = sum(shares.values())
    return {
        name: sum(
            states[step][name].double() * (share / total) for step, share in shares.items()
        ).float()  # type: ignore[union-attr]
        for name in states[max(shares)]
    }


@pytest.mark.slow
def test_the_mean_of_the_last_ones(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "mean"
    assert main(["merge", "--run", str(run), "--last", "3", "--output", str(output),
                 "--dtype", "float32"]) == 0  # fmt: skip
    expected = mean_of(run, {4: 1.0, 8: 1.0, 12: 1.0})
    means_by_name = load_file(output / "model.safetensors")
    assert means_by_name
    for name, tensor in means_by_name.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)
    (model_card,) = output.glob("README.md")
    assert "mean of the checkpoints of steps (shares) 4 (0.333), 8 (0.333), 12 (0.333)" in (
        model_card.read_text()
    )
    AutoModelForCausalLM.from_pretrained(output)
    newest = bigtrain.load_state_dict(run)
    assert any(not torch.equal(means_by_name[name], newest[name]) for name in means_by_name)


def test_shares_of_named_steps(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "mean"
    chosen = bigtrain.merge_run(run, output, steps=[4, 12], weights=[1.0, 3.0], dtype="float32")
    assert chosen == [4, 12]
    expected = mean_of(run, {4: 1.0, 12: 3.0})
    for name, tensor in load_file(output / "model.safetensors").items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)


def test_what_cannot_be_merged_is_refused(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "mean"
    for options, text in (
        ({"last": 1}, "--last = 1: is not several checkpoints"),
        ({"steps": [4]}, "is not several different steps"),
        ({"steps": [4, 4]}, "is not several different steps"),
        ({}, "--last and --steps: are not given"),
        ({"last": 2, "steps": [4, 8]}, "are both given"),
        ({"last": 2, "weights": [1.0]}, "has 1 shares for 2 checkpoints"),
        ({"last": 2, "weights": [1.0, 0.0]}, "is not above zero"),
    ):
        with pytest.raises(ConfigError) as caught:
            bigtrain.merge_run(run, output, **options)  # type: ignore[arg-type]
        assert text in str(caught.value)
    with pytest.raises(CheckpointError, match="has 3 complete checkpoints, and --last 4 needs 4"):
        bigtrain.merge_run(run, output, last=4)
    with pytest.raises(CheckpointError, match="7"):
        bigtrain.merge_run(run, output, steps=[4, 7])
    output.mkdir()
    with pytest.raises(ModelError, match="exists already"):
        bigtrain.merge_run(run, output, last=2)
