"""A live page gets what it lacks and nothing else; the server is this machine's alone."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from bigtrain.errors import LaunchError
from bigtrain.report import live
from bigtrain.report.live import LivePage, open_server
from bigtrain.report.run_files import open_runs
from tests.support.run_directories import evaluation_line, make_run, step_line
from tests.support.worlds import ROOT
from tests.unit.report.test_page import data_of, numbers


@pytest.fixture(autouse=True)
def _look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "POLL_SECONDS", 0.0)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", [step_line(1), step_line(2), evaluation_line(2, 3.0)])


def append(directory: Path, *lines: dict[str, Any]) -> None:
    with (directory / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def news_of(page: LivePage, seen: int, have: str = "0:1:2:1:1:1:0") -> dict[str, Any]:
    news = page.news(seen, have)
    assert news is not None
    answer: dict[str, Any] = json.loads(news)
    return answer


def test_nothing_new_is_nothing(directory: Path) -> None:
    page = LivePage(open_runs([directory], final=False))
    data = data_of(page.html().decode())
    assert data["live"] is True
    assert page.news(data["revision"], "0:1:2:1:1:1:0") is None


def test_what_is_new_is_sent_alone(directory: Path) -> None:
    page = LivePage(open_runs([directory], final=False))
    append(directory, step_line(3, loss=1.5), evaluation_line(3, 2.5))
    answer = news_of(page, 1)
    [run] = answer["runs"]
    assert run["steps"]["since"] == 2
    assert numbers(run["steps"]["step"], "<f8") == [3]
    assert numbers(run["steps"]["series"]["loss"]["mean"]) == [1.5]
    assert run["evaluations"]["since"] == 1
    assert numbers(run["evaluations"]["series"]["held_out_loss"]["mean"]) == [2.5]
    assert "3 of 1,000" in answer["sections"]["figures"]
    assert page.news(answer["revision"], "0:1:3:1:2:1:0") is None


@pytest.mark.parametrize(
    "have",
    ["", "x", "0:1:2:1:1", "1:1:2:1:1:1:0", "0:2:2:1:1:1:0", "0:1:99:1:99:1:9", "0:1:-1:1:-1:1:-1"],
)
def test_who_has_something_else_gets_all(directory: Path, have: str) -> None:
    page = LivePage(open_runs([directory], final=False))
    append(directory, step_line(3))
    [run] = news_of(page, 1, have)["runs"]
    assert run["steps"]["since"] == 0
    assert numbers(run["steps"]["step"], "<f8") == [1, 2, 3]


def test_steps_that_were_taken_back_go(directory: Path) -> None:
    page = LivePage(open_runs([directory], final=False))
    path = directory / "metrics.jsonl"
    path.write_text(json.dumps(step_line(1)) + "\n")
    [run] = news_of(page, 1)["runs"]
    assert run["version"] == 1
    assert run["steps"]["since"] == 0
    assert numbers(run["steps"]["step"], "<f8") == [1]
    assert run["evaluations"]["series"] == {}


def test_a_new_start_is_news_without_a_step(directory: Path) -> None:
    page = LivePage(open_runs([directory], final=False))
    lines = [{"generation": n, "step": n - 1, "time": "t"} for n in (1, 2)]
    (directory / "starts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    answer = news_of(page, 1)
    assert [one["kind"] for one in answer["runs"][0]["marks"]] == ["restart"]


def test_figures_that_are_gone_for_a_moment_still_show(directory: Path) -> None:
    page = LivePage(open_runs([directory], final=False))
    path = directory / "metrics.jsonl"
    kept = path.read_bytes()
    path.unlink()
    assert page.news(1, "0:1:2:1:1:1:0") is None
    path.write_bytes(kept)
    append(directory, step_line(3))
    [run] = news_of(page, 1, "")["runs"]
    assert numbers(run["steps"]["step"], "<f8") == [1, 2, 3]


@pytest.fixture
def port(directory: Path, free_port: int) -> Iterator[int]:
    server = open_server(open_runs([directory], final=False), free_port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield free_port
    server.shutdown()
    thread.join()
    server.server_close()


def ask(port: int, path: str, host: str = "localhost:1") -> tuple[int, str, bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers={"Host": host})
    answer = connection.getresponse()
    result = answer.status, answer.headers.get("Content-Type", ""), answer.read()
    connection.close()
    return result


def test_what_the_server_answers(port: int) -> None:
    code, kind, body = ask(port, "/")
    assert (code, kind) == (200, "text/html; charset=utf-8")
    assert b"connect-src 'self'" in body
    assert ask(port, "/data?seen=1&have=0:1:2:1:1:1:0") == (204, "", b"")
    code, kind, body = ask(port, "/data?seen=x")
    assert (code, kind) == (200, "application/json")
    assert json.loads(body)["revision"] == 1
    assert ask(port, "/metrics.jsonl")[0] == 404
    assert ask(port, "/../config.json")[0] == 404


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8600", "127.0.0.1.evil.example"])
def test_a_page_of_another_name_reads_nothing(port: int, host: str) -> None:
    assert ask(port, "/", host)[0] == 403


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "localhost:9000"])
def test_tunnels_of_other_ports_are_served(port: int, host: str) -> None:
    assert ask(port, "/", host)[0] == 200


def test_it_listens_on_this_machine_alone(port: int, directory: Path) -> None:
    assert live.ADDRESS == "127.0.0.1"
    with socket.socket() as other:
        other.settimeout(5)
        with pytest.raises(OSError, match=r"."):
            other.connect(("127.0.0.2", port))


def test_a_port_that_is_taken_is_one_error(directory: Path, port: int) -> None:
    with pytest.raises(LaunchError) as error:
        open_server(open_runs([directory], final=False), port)
    text = str(error.value)
    assert text.startswith(f"--port {port}: cannot be opened on 127.0.0.1: Address already in use")
    free = int(text.split("--port ")[-1].split(" is free")[0])
    assert 0 < abs(free - port) <= 50
    open_server(open_runs([directory], final=False), free).server_close()


def test_the_command_serves_until_ctrl_c(directory: Path, free_port: int) -> None:
    """A line whose end is not written yet counts once it is, and once."""
    metrics = directory / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write(json.dumps(step_line(3)))
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "bigtrain", "report", "--run", directory),
            *("--live", "--port", str(free_port)),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == f"http://127.0.0.1:{free_port}/ until Ctrl-C\n"
    with metrics.open("a") as file:
        file.write("\n")
    html = ask(free_port, "/")[2].decode()
    assert numbers(data_of(html)["runs"][0]["steps"]["step"], "<f8") == [1, 2, 3]
    assert "left out" not in html
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, output, errors) == (0, "ended\n", "")
    assert not (directory / "report.html").exists()


def test_looks_are_so_many_at_most(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many browsers ask, files are read once a second."""
    monkeypatch.setattr(live, "POLL_SECONDS", 1000.0)
    page = LivePage(open_runs([directory], final=False))
    page.html()
    append(directory, step_line(3))
    assert page.news(1, "0:1:2:1:1:1:0") is None
