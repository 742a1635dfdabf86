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
        rf"{run_directory}/report\.html: 2 logged steps, 0\.1 MiB, in \d+\.\d s\n"
        rf"next:\n  xdg-open {run_directory}/report\.html   # or any browser\n",
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--output .", ".: is a directory -> name a file as --output"),
        ("--output none/page.html", "none/page.html: cannot be written: .*No such file or direct"),
        ("--run none", "no such directory"),
        ("--compare run/../run", "the same run is named twice -> remove one of them"),
        ("--live --output page.html", "= 'page.html': --live serves the page and does not write"),
        ("--port 8000", "--port = 8000: applies only to --live -> remove it, or add --live"),
    ],
)
def test_what_cannot_be_is_one_error(
    words: str,
    said: str,
    run_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(run_directory.parent)
    assert re.search(said, fails(capsys, "--run", "run", *words.split()))


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


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_output_that_may_not_be_written(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_directory.chmod(0o500)
    text = fails(capsys, "--run", run_directory)
    assert "report.html: cannot be written: " in text


@pytest.mark.parametrize("port", ["0", "65536", "80.5", "²"])
def test_a_port_is_a_number(
    run_directory: Path, port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        report("--run", run_directory, "--live", f"--port={port}")
    assert f"'{port}' is not a port: an integer from 1 to 65535" in capsys.readouterr().err
