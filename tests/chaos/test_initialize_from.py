"""`checkpoint.initialize_from`: the weights of a run or a Hugging Face directory, and no more."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from bigtrain.engine.checkpoint.io import read_full, read_full_masters
from bigtrain.errors import ConfigError
from bigtrain.models.build import build_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.run.checkpointing import checkpoints
from bigtrain.run.checkpointing.initialize import weights_source
from bigtrain.settings.run_config import ModelSection, RunConfig
from tests.chaos.conftest import STEPS
from tests.support.lives import Server

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


def new_run(run_yaml: Path, source: Path, directory: Path, **model: Any) -> dict[str, Any]:
    """One step that starts from `source`, with a learning rate that changes nothing."""
    tree: dict[str, Any] = yaml.safe_load(run_yaml.read_text())
    tree["model"]["config"] |= model
    return tree | {
        "train": {"steps": 1},
        "optimizer": {"lr": 1e-30},
        "schedule": {"type": "constant"},
        "checkpoint": {"initialize_from": str(source)},
        "output": {"directory": str(directory), "export": False},
        "engine": {"deepspeed_config": "zero3"},
    }


def live(
    server: Server, tree: dict[str, Any], tmp_path: Path, world_size: int = 2
) -> tuple[list[int], str]:
    path = tmp_path / "new.yaml"
    path.write_text(yaml.safe_dump(tree))
    return server.live(["--config", str(path)], world_size=world_size)


@pytest.fixture
def hugging_face(run_yaml: Path, tmp_path: Path) -> Path:
    """Weights of the run's architecture that no run has."""
    section = ModelSection.model_validate(yaml.safe_load(run_yaml.read_text())["model"])
    build_model(section, load_hf_config(section), seed=99).save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


@pytest.mark.parametrize(
    "kind",
    ["run", *(pytest.param(k, marks=pytest.mark.slow) for k in ("checkpoint", "hugging face"))],
)
def test_weights_are_taken_and_nothing_else(
    kind: str,
    server: Server,
    run_yaml: Path,
    uninterrupted: Path,
    hugging_face: Path,
    tmp_path: Path,
) -> None:
    checkpoint = checkpoints.checkpoint_path(uninterrupted, STEPS if kind == "run" else 16)
    old = read_full_masters(checkpoint / "tensors")
    source = {"run": uninterrupted, "checkpoint": checkpoint}.get(kind, hugging_face)
    if source == hugging_face:
        section = ModelSection(path=str(hugging_face))
        model = build_model(section, load_hf_config(section), seed=0)
        old = dict(model.named_parameters())
    run = tmp_path / "run"
    codes, text = live(server, new_run(run_yaml, source, run), tmp_path)
    assert codes == [0, 0], text
    directory = checkpoints.find(run, 1)
    weights = read_full_masters(directory / "tensors")
    assert weights.keys() == old.keys()
    for name, tensor in old.items():
        assert torch.equal(weights[name], tensor), name
    state = checkpoints.read_state(directory)
    assert (state["step"], state["samples"], state["engine"]["optimizer_steps"]) == (1, 4, 1)
    # The first moment after one step from nothing: 1 - beta1 times a gradient clipped to norm 1.
    first = read_full(directory / "tensors", prefixes=("exp_avg",)).values()
    norm = float(sum(t.double().square().sum() for t in first)) ** 0.5
    assert 0 < norm <= 0.1 + 1e-6


@pytest.mark.parametrize("kind", ["run", "hugging face"])
def test_another_shape_is_refused(
    kind: str,
    server: Server,
    run_yaml: Path,
    uninterrupted: Path,
    hugging_face: Path,
    tmp_path: Path,
) -> None:
    source = uninterrupted if kind == "run" else hugging_face
    run = tmp_path / "run"
    tree = new_run(run_yaml, source, run, intermediate_size=48)
    codes, text = live(server, tree, tmp_path, world_size=1)
    assert codes == [2], text
    assert "Traceback" not in text
    assert "checkpoint.initialize_from" in text
    if kind == "hugging face":
        assert (
            "has shape [32, 16], the model's model.layers.0.mlp.gate_proj.weight [48, 16]" in text
        )
    if kind == "run":
        assert "has shape [32, 16] there and [48, 16] in this run's model" in text
    assert not run.exists()


def test_a_run_with_nothing_whole_is_refused(
    server: Server, run_yaml: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    corrupt = tmp_path / "corrupt"
    shutil.copytree(uninterrupted, corrupt)
    for step in checkpoints.list_steps(corrupt):
        (checkpoints.checkpoint_path(corrupt, step) / "state.json").unlink()
    tree = new_run(run_yaml, corrupt, tmp_path / "run")
    codes, text = live(server, tree, tmp_path, world_size=1)
    assert codes == [2], text
    assert "checkpoint.initialize_from: " in text
    assert "step-00000024/state.json: missing" in text


def test_what_is_no_source_is_refused(run_yaml: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for source, said in (
        (tmp_path / "empty", "is not a run, checkpoint or Hugging Face folder"),
        (tmp_path / "nowhere", "not found"),
        (tmp_path / "run", "is this run's own output.directory"),
    ):
        tree = new_run(run_yaml, source, tmp_path / "run")
        with pytest.raises(ConfigError, match=said):
            weights_source(RunConfig.model_validate(tree))
