"""The page on hybrid models: its run trains as one process does, and is exported."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from bigtrain.cli import main as bigtrain
from tests.launch.conftest import Inputs, finished_run, inputs, metrics, trained
from tests.support.pages import page_blocks, page_text

__all__ = ["finished_run", "inputs"]

PAGE = page_text("docs/howto/hybrid.md")


@pytest.fixture
def folder(inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the page's run and its shards, in which commands are typed."""
    (block,) = page_blocks(PAGE, "yaml")
    (tmp_path / "hybrid.yaml").write_text(block)
    shutil.copytree(inputs.shards, tmp_path / "shards")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_the_run_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    _, check, plan = page_blocks(PAGE)
    assert bigtrain(shlex.split(check)[1:]) == 0
    assert "this run can start" in capsys.readouterr().out
    assert bigtrain(shlex.split(plan)[1:]) == 0
    assert "ZeRO" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_the_run_trains_as_one_process(folder: Path) -> None:
    typed = shlex.split(page_blocks(PAGE)[0])
    start = ["torchrun", "--nproc-per-node", "2", "bigtrain/train.py"]
    assert typed == [*start, "--config", "hybrid.yaml"]
    run = ["--config", str(folder / "hybrid.yaml"), f"data.path={folder / 'shards'}"]
    run.append("logging.every_steps=1")
    said = trained(*run, f"output.directory={folder / 'runs/hybrid'}", num_processes=2)
    assert "states and convolutions of recurrent layers start afresh at each" in said
    trained(*run, "parallel.sequence=1", f"output.directory={folder / 'runs/one'}")
    for key in ("loss", "grad_norm", "held_out_loss"):
        expected = metrics(folder / "runs/one", key)
        assert metrics(folder / "runs/hybrid", key) == pytest.approx(expected, rel=1e-4), key
    assert (folder / "runs/hybrid/hf/model.safetensors").is_file()
    # A resume with another kind.
    (last,) = (folder / "runs/hybrid").glob("**/step*8")
    shutil.rmtree(last)
    own = f"output.directory={folder / 'runs/hybrid'}"
    trained(*run, own, "parallel.sequence=2", num_processes=2)
    expected = metrics(folder / "runs/one")
    assert metrics(folder / "runs/hybrid") == pytest.approx(expected, rel=1e-4)
