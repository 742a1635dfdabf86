"""`import bigtrain` trains in the process that calls it, and leaves it as it was."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest

from tests.launch.conftest import Inputs
from tests.support.lives import run_script, shared_server
from tests.support.worlds import ROOT

WORKER = ROOT / "tests/launch/python_api_worker.py"


@pytest.mark.slow
def test_the_page_of_the_docs_runs_from_its_top(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number, source in enumerate(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]):
        (tmp_path / "texts" / f"{number}.txt").write_bytes(source.read_bytes())
    output = run_script(1, WORKER, "page", ROOT / "docs/howto/python.md", tmp_path)
    assert "page done" in output
    assert "parallel.tensor" in output


@pytest.mark.slow
def test_a_process_is_as_before_and_trains_again(inputs: Inputs, tmp_path: Path) -> None:
    assert "trained" in run_script(1, WORKER, "trains", inputs.run_yaml, tmp_path)


def test_a_loss_of_the_program_trains(inputs: Inputs, tmp_path: Path) -> None:
    assert "losses done" in run_script(1, WORKER, "losses", inputs.run_yaml, tmp_path)


@pytest.mark.slow
def test_a_stream_trains_further_in_the_same_process(inputs: Inputs, tmp_path: Path) -> None:
    output = run_script(1, WORKER, "streams", inputs.run_yaml, tmp_path)
    assert "streams done" in output


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_compute_what_train_py_does(inputs: Inputs, tmp_path: Path) -> None:
    run_script(2, WORKER, "world", inputs.run_yaml, tmp_path)
    results = [json.loads((tmp_path / f"result-{rank}.json").read_text()) for rank in (0, 1)]
    assert results[0] == results[1]
    assert results[0]["step"] == 4
    arguments = ["--config", str(inputs.run_yaml), f"output.directory={tmp_path}/program"]
    codes, output = shared_server().live([*arguments, "train.steps=4"], world_size=2)
    assert codes == [0, 0], output
    lines = {}
    for name in ("world", "program"):
        text = (tmp_path / name / "metrics.jsonl").read_text()
        rows = [json.loads(line) for line in text.splitlines()]
        lines[name] = [(r["step"], r.get("loss"), r.get("held_out_loss")) for r in rows]
    assert lines["world"] == lines["program"]
    assert lines["world"][-1][2] == results[0]["held_out"]
