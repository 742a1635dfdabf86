"""`bigtrain report`: writes one page, over nothing else, and what is wrong is one error."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from bigtrain.cli import main
from tests.support.run_directories import eventful_run, make_run, step_line


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", [step_line(1), step_line(2)])


def report(*words: object) -> int:
    return main(["report", *map(str, words)])


def fails(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert report(*words) == 2
    output = capsys.readouterr()
    assert output.out == ""
    return output.err


def test_the_page_is_written_into_the_run(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path.name for path in run_directory.iterdir()}
    assert report("--run", run_directory) == 0
    assert re.fullmatch(
        rf"{run_directory}/report\.html: 2 logged steps, 0\.1 MiB, in \d+\.\d s\n",
        capsys.readouterr().out,
    )
    assert {path.name for path in run_directory.iterdir()} == {*before, "report.html"}


def test_a_report_is_replaced(run_directory: Path, tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    assert report("--run", run_directory, "--output", output) == 0
    first = output.read_text()
    with (run_directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 1.0}\n')
    assert report("--run", run_directory, "--output", output) == 0
    assert "3 of 1,000" in output.read_text()
    assert "3 of 1,000" not in first


def test_several_runs(run_directory: Path, tmp_path: Path) -> None:
    others = [eventful_run(tmp_path / name, num_steps=60) for name in ("a", "b", "c")]
    output = tmp_path / "page.html"
    words = ["--compare", *others[:2], "--compare", others[2], "--output", output]
    assert report("--run", run_directory, *words) == 0
    assert "<h1>4 runs</h1>" in output.read_text()


def test_nothing_else_is_overwritten(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_directory / "config.json"
    before = config.read_bytes()
    text = fails(capsys, "--run", run_directory, "--output", config)
    assert text == (
        f"bigtrain report: {config}: exists and is not a bigtrain report, so it is not overwritten "
        "-> choose another file as --output, or remove it first\n"
    )
    assert config.read_bytes() == before


def test_an_output_that_is_a_directory(
    run_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = fails(capsys, "--run", run_directory, "--output", tmp_path)
    assert f"{tmp_path}: is a directory -> name a file as --output" in text


def test_an_output_in_no_directory(
    run_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "none" / "page.html"
    text = fails(capsys, "--run", run_directory, "--output", output)
    assert f"{output}: cannot be written: " in text
    assert "No such file or directory" in text
    assert "-> choose another file as --output" in text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_output_that_may_not_be_written(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_directory.chmod(0o500)
    text = fails(capsys, "--run", run_directory)
    assert "report.html: cannot be written: " in text


def test_no_such_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such directory" in fails(capsys, "--run", tmp_path / "none")


def test_the_same_run_twice(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = fails(capsys, "--run", run_directory, "--compare", f"{run_directory}/../run")
    assert "the same run is named twice -> remove one of them" in text


def test_a_live_page_is_written_nowhere(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = fails(capsys, "--run", run_directory, "--live", "--output", "page.html")
    assert "--output = 'page.html': --live serves the page and does not write one" in text


def test_a_port_is_of_live_alone(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = fails(capsys, "--run", run_directory, "--port", "8000")
    assert "--port = 8000: applies only to --live -> remove it, or add --live" in text


@pytest.mark.parametrize("port", ["0", "65536", "-1", "x", "80.5", "²"])
def test_a_port_is_a_number(
    run_directory: Path, port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        report("--run", run_directory, "--live", f"--port={port}")
    assert f"'{port}' is not a port: an integer from 1 to 65535" in capsys.readouterr().err
