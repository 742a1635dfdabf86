"""A run whose checkpoints are copied to a bucket: fetched elsewhere, it resumes."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigtrain.cli import main as bigtrain
from tests.launch.conftest import Inputs, metrics, snapshot
from tests.support.lives import shared_server
from tests.support.remote_servers import S3_VARIABLES, BreakingLine, s3_server

ADDRESS = "s3://bucket/runs/mine"


@pytest.mark.slow
def test_a_run_resumes_from_its_copy(
    inputs: Inputs, finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "server/bucket").mkdir(parents=True)
    there = tmp_path / "server/bucket/runs/mine"
    for name, value in S3_VARIABLES.items():
        monkeypatch.setenv(name, value)
    command = ["--config", str(inputs.run_yaml), f"output.copy_to={ADDRESS}"]

    def copied_run(port: int, *more: str) -> str:
        variables = {**S3_VARIABLES, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
        arguments = [*command, *more]
        codes, output = shared_server().live(arguments, world_size=1, environment=variables)
        assert codes == [0], output
        return output

    # One is copied and one waits, however slow the line is: with a third one would be left out.
    command += ["checkpoint.every_steps=8"]
    with s3_server(tmp_path / "server") as port, BreakingLine(port, (200, 900)).running() as way:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{way}")
        # As a run that was stopped at step 8: what it wrote later is not looked at.
        first = copied_run(way, f"output.directory={tmp_path / 'run'}")
        assert f"checkpoints/step-00000012 copied to {ADDRESS}/checkpoints" in first
        assert f"hf copied to {ADDRESS}/hf" in first
        assert S3_VARIABLES["AWS_SECRET_ACCESS_KEY"] not in first
        step = "checkpoints/step-00000012"
        copied = {n: c for n, c in snapshot(there / step).items() if n != "copying.json"}
        assert copied == snapshot(tmp_path / "run" / step)
        assert snapshot(there / "hf") == snapshot(tmp_path / "run/hf")
        assert metrics(tmp_path / "run") == metrics(finished_run)
        assert bigtrain(["fetch", ADDRESS, str(tmp_path / "back"), "--step", "8"]) == 0
        # What came back is a run that goes on; its own copies go where nobody answers.
    again = copied_run(way, f"output.directory={tmp_path / 'back'}", "output.copy_wait_seconds=1")
    assert "not everything was copied" in again
    losses_by_step, wanted = metrics(tmp_path / "back"), metrics(finished_run)
    assert {step: losses_by_step[step] for step in range(9, 13)} == {
        s: wanted[s] for s in range(9, 13)
    }
