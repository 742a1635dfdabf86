"""The page on code of one's own: its files are written, checked and run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from bigtrain.errors import LaunchError
from bigtrain.settings.sections.extensions import SHIPPED_CALLBACKS
from tests.launch.conftest import Inputs, inputs
from tests.support.http_server import Receiver
from tests.support.lives import run_forked_world, run_script
from tests.support.pages import page_text
from tests.support.worlds import ROOT, free_port

PAGE = page_text("docs/howto/extend.md")
WORKER = ROOT / "tests/launch/extension_worker.py"

__all__ = ["inputs"]


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, flags=re.M | re.S)


@pytest.fixture
def folder(inputs: Inputs, tmp_path: Path) -> Path:
    """A directory with the page's files and shards."""
    shutil.copytree(inputs.shards, tmp_path / "shards")
    names = ("mine.py", "mymodel.py", "arithmetic.py", "endless.py", "program.py")
    for name, text in zip(names, blocks("python"), strict=True):
        (tmp_path / name).write_text(text)
    (tmp_path / "extended.yaml").write_text(blocks("yaml")[0])
    return tmp_path


def lines(folder: Path, name: str = "extended") -> list[dict[str, Any]]:
    text = (folder / f"runs/{name}/metrics.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()) if "loss" in line]


def type_lines(folder: Path) -> None:
    """Type the page's command lines, as in a checkout that has its files."""
    (folder / "bigtrain").symlink_to(ROOT / "bigtrain")
    path = f"{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    typed = re.findall(r"^(?:bigtrain|python) .*", PAGE, flags=re.M)
    assert len(typed) == 2
    for line in typed:
        subprocess.run(shlex.split(line), cwd=folder, check=True, env=environment)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_run_calls_the_code(folder: Path, world_size: int) -> None:
    if world_size == 1:
        type_lines(folder)
    else:
        run_script(world_size, WORKER, folder, "--config", "extended.yaml")
    rows = lines(folder)
    rate = yaml.safe_load(blocks("yaml")[0])["optimizer"]["lr"]
    assert [row["lr"] for row in rows] == [rate * 0.5 ** (step * 3 // 12) for step in range(12)]
    assert [row["recorded"] for row in rows] == [
        {"loss_over_target": pytest.approx(row["loss"] / 0.5)} for row in rows
    ]
    written = (folder / "runs/extended/watch.jsonl").read_text().splitlines()
    names = [Path(json.loads(line)["checkpoint"]).name for line in written]
    assert names == ["step-00000004", "step-00000008", "step-00000012"]


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_end_after_the_step_that_reaches_the_target(folder: Path) -> None:
    text = blocks("yaml")[0].replace("target_loss: 0.5", "target_loss: 5.6")
    (folder / "extended.yaml").write_text(text)
    output = run_script(2, WORKER, folder, "--config", "extended.yaml")
    rows = lines(folder)
    assert [float(str(row["loss"])) < 5.6 for row in rows] == [False] * (len(rows) - 1) + [True]
    assert 1 < len(rows) < 12
    assert f"step {len(rows)}: a callback asked to end the run: loss" in output
    assert (folder / "runs/extended/hf/model.safetensors").exists()
    # Again: nothing to do; with more steps it goes on.
    assert "has stopped early; nothing to do" in run_script(
        2, WORKER, folder, "--config", "extended.yaml"
    )
    more = ("train.steps=13", "checkpoint.allow_changes=[train.steps]", "callbacks=[]")
    run_script(2, WORKER, folder, "--config", "extended.yaml", *more)
    assert len(lines(folder)) == 13


@pytest.mark.slow
def test_the_callbacks_of_bigtrain(folder: Path) -> None:
    """The YAML of the page in its run; each callback does something, and nothing is missing."""
    callbacks = yaml.safe_load(blocks("yaml")[1])["callbacks"]
    assert [one["type"] for one in callbacks] == list(SHIPPED_CALLBACKS)
    typed = re.search(r"^export (\w+)=https://hooks.slack.com", PAGE, flags=re.M)
    assert typed is not None
    [prometheus] = [one["settings"] for one in callbacks if one["type"] == "prometheus"]
    prometheus["port"] = free_port()
    with Receiver() as server:
        environment = {typed[1]: f"{server.url}/hook", "OTEL_EXPORTER_OTLP_ENDPOINT": server.url}
        script = [str(WORKER), str(folder), "--config", "extended.yaml", "train.steps=2"]
        script.append(f"callbacks={json.dumps(callbacks)}")
        output = run_forked_world(1, script, environment)
    assert "KUBEFLOW_TRAINER_SERVER_URL is not set" in output
    [message] = [post.tree["text"] for post in server.posts if post.path == "/hook"]
    assert "is complete" in message
    assert any(post.path == "/v1/metrics" for post in server.posts)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = re.search(r"^pip install '\.\[(.*)\]'$", PAGE, flags=re.M)
    assert installed is not None
    needed = [name for name, one in SHIPPED_CALLBACKS.items() if one.modules]
    assert installed[1].split(",") == needed
    assert set(needed) <= extras["optional-dependencies"].keys()


LAYOUTS = {
    "ZeRO 0": (1, []),
    "tensor parallelism": (2, ["parallel.tensor=2"]),
    "pipeline": (2, ["parallel.pipeline=2", "engine.deepspeed_config=zero1"]),
}


@pytest.mark.distributed
@pytest.mark.slow
def test_a_model_trains_the_same_in_every_layout(folder: Path) -> None:
    losses = {}
    section = yaml.safe_load(blocks("yaml")[2])["model"]
    for name, (world_size, layout) in LAYOUTS.items():
        run_script(
            *(world_size, WORKER, folder, "--config", "extended.yaml", *layout),
            *(f"model={json.dumps(section)}", f"output.directory=runs/{name}", "train.steps=4"),
        )
        rows = lines(folder, name)
        losses[name] = [(row["loss"], row["grad_norm"]) for row in rows]
        assert all(0 < row["recorded"]["active"] < 1 for row in rows)
        config = json.loads((folder / f"runs/{name}/hf/config.json").read_text())
        assert config["model_type"] == "squared_llama"
    command = ROOT / "tests/launch/command_worker.py"
    run_script(1, command, folder, "export", "--run", "runs/pipeline", "--output", "again")
    exported = [
        (folder / one / "model.safetensors").read_bytes() for one in ("again", "runs/pipeline/hf")
    ]
    assert exported[0] == exported[1]
    for name, values in losses.items():
        assert len(values) == 4
        for own, expected in zip(values, losses["ZeRO 0"], strict=True):
            assert own == pytest.approx(expected, rel=1e-5), name


@pytest.mark.slow
def test_the_program_of_the_page(folder: Path) -> None:
    output = run_script(1, WORKER, folder, "page", "program.py")
    assert "12 {'active': " in output
    assert (folder / "runs/python/watch.jsonl").exists()
    assert (folder / "runs/python/again.jsonl").exists()
    recorded = json.loads((folder / "runs/python/config.json").read_text())
    assert recorded["model"]["type"] == "mymodel:SquaredForCausalLM"


@pytest.mark.slow
@pytest.mark.distributed
def test_a_source_of_samples_resumes_at_another_world_size(folder: Path) -> None:
    data = json.dumps(yaml.safe_load(blocks("yaml")[3])["data"])
    arguments = ["--config", "extended.yaml", f"data={data}", "callbacks=[]"]
    arguments.append("schedule={type: constant}")
    run_script(1, WORKER, folder, *arguments, "output.directory=runs/whole")
    run_script(2, WORKER, folder, *arguments, "output.directory=runs/parts", "train.steps=4")
    more = ("output.directory=runs/parts", "checkpoint.allow_changes=[train.steps]")
    run_script(1, WORKER, folder, *arguments, *more)
    parts = losses_of(folder, "parts")
    assert parts == pytest.approx(losses_of(folder, "whole"), rel=1e-5)
    assert len(parts) == 12
    arguments[2] = arguments[2].replace("400", "401")
    with pytest.raises(LaunchError, match="not have the training tokens that this run"):
        run_script(1, WORKER, folder, *arguments, *more)


def losses_of(folder: Path, name: str) -> list[float]:
    return [line["loss"] for line in lines(folder, name)]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_stream_resumes_with_its_next_sample(folder: Path, world_size: int) -> None:
    """At the same world size to the last bit, and at another one."""
    data = json.dumps(yaml.safe_load(blocks("yaml")[4])["data"])
    arguments = ["--config", "extended.yaml", f"data={data}", "callbacks=[]"]
    arguments += ["schedule={type: constant}", "output.export=false"]
    run_script(1, WORKER, folder, *arguments, "output.directory=runs/whole")
    own = (*arguments, "output.directory=runs/parts", "checkpoint.allow_changes=[train.steps]")
    run_script(world_size, WORKER, folder, *own, "train.steps=4")
    state = folder / "runs/parts/checkpoints/step-00000004/state.json"
    position = json.loads(state.read_text())["stream"]
    assert position["sample"] == position["state"]["number"] > 0
    run_script(1, WORKER, folder, *own)
    whole = losses_of(folder, "whole")
    assert len(whole) == 12
    expected = whole if world_size == 1 else pytest.approx(whole, rel=1e-5)
    assert losses_of(folder, "parts") == expected
