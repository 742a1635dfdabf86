"""`bigtrain export --push-to-hub` against a server with the hub's interface on this machine."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "hf_of_a_test"
NAME = "me/model"


@dataclass
class Hub:
    """What was asked of the server: repositories made, and files by repository."""

    address: str = ""
    takes_commits: bool = True
    made: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)


@contextmanager
def served(hub: Hub) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def answer(self, status: int, tree: Any) -> None:
            body = json.dumps(tree).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def is_known(self) -> bool:
            known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            if not known:
                self.answer(401, {"error": "Invalid credentials"})
            return known

        def do_GET(self) -> None:
            if not self.is_known():
                return
            if self.path == "/api/whoami-v2":
                self.answer(200, {"name": "me", "type": "user", "orgs": []})
            else:
                self.answer(200, {"id": NAME, "sha": "0" * 40, "siblings": []})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if not self.is_known():
                return
            if self.path == "/api/repos/create":
                hub.made.append(json.loads(body))
                self.answer(200, {"url": f"{hub.address}/{NAME}"})
            elif self.path == "/api/validate-yaml":
                self.answer(200, {"errors": [], "warnings": []})
            elif self.path == f"/api/models/{NAME}/preupload/main":
                files = [
                    {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for f in json.loads(body)["files"]
                ]
                self.answer(200, {"files": files})
            elif self.path == f"/api/models/{NAME}/commit/main" and hub.takes_commits:
                for line in map(json.loads, body.splitlines()):
                    value = line["value"]
                    if line["key"] == "header":
                        hub.messages.append(value["summary"])
                    else:
                        hub.files[value["path"]] = base64.b64decode(value["content"])
                address = f"{hub.address}/{NAME}/commit/{'0' * 40}"
                self.answer(200, {"success": True, "commitOid": "0" * 40, "commitUrl": address})
            else:
                self.answer(403, {"error": "this token may not write"})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def exported(
    run: Path, output: Path, hub: Hub, *words: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bigtrain.cli", "export", "--run", str(run)]
    return subprocess.run(
        [*command, "--output", str(output), *words],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HF_ENDPOINT": hub.address,
            "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": TOKEN,
            "HF_HOME": str(output.parent / "hf_home"),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.distributed
def test_what_was_verified_is_what_is_sent(finished_run: Path, tmp_path: Path) -> None:
    with served(Hub()) as hub:
        done = exported(finished_run, tmp_path / "hf", hub, "--push-to-hub", NAME, "--private")
    assert done.returncode == 0, done.stderr
    verified, pushed = done.stdout.splitlines()  # and nothing of DeepSpeed's
    assert "same logits" in verified
    assert pushed == f"pushed to {hub.address}/{NAME}"
    here = {str(p.relative_to(tmp_path / "hf")): p for p in (tmp_path / "hf").rglob("*")}
    assert hub.files == {name: path.read_bytes() for name, path in here.items()}
    assert {"model.safetensors", "config.json", "README.md"} <= hub.files.keys()
    (made,) = hub.made
    assert (made["name"], made["organization"], made["visibility"]) == ("model", "me", "private")
    assert hub.messages[0].startswith("Step ")
    assert TOKEN not in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.distributed
def test_a_hub_that_refuses_costs_nothing(finished_run: Path, tmp_path: Path) -> None:
    with served(Hub(takes_commits=False)) as hub:
        done = exported(finished_run, tmp_path / "hf", hub, "--push-to-hub", NAME)
    assert done.returncode == 2
    assert f"is written and verified, and was not pushed to {NAME}: " in done.stderr
    assert f"-> hf upload {NAME} {tmp_path / 'hf'}" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "hf" / "model.safetensors").exists()


REFUSED: dict[str, tuple[list[str], dict[str, str], str]] = {
    "a name": (["--push-to-hub", "a/b/c"], {}, "is not a repository name -> OWNER/NAME"),
    "offline": (["--push-to-hub", NAME], {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
    "no login": (["--push-to-hub", NAME], {"HF_TOKEN": ""}, "not logged in -> hf auth login"),
    "another token": (
        ["--push-to-hub", NAME],
        {"HF_TOKEN": "hf_other"},
        "answers 401 to the",
    ),
    "no server": (
        ["--push-to-hub", NAME],
        {"HF_ENDPOINT": "http://127.0.0.1:9"},
        "http://127.0.0.1:9 cannot be reached",
    ),
    "nothing to be private": (
        ["--private"],
        {},
        "--private: applies to a repository, but none is",
    ),
}


REFUSED_BY_SETTINGS = ("offline", "no login", "nothing to be private")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in REFUSED_BY_SETTINGS else pytest.mark.slow)
        for name in REFUSED
    ],
)
def test_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    words, environment, said = REFUSED[name]
    with served(Hub()) as hub:
        done = exported(tmp_path / "no run", tmp_path / "hf", hub, *words, **environment)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert hub.made == []
    assert not (tmp_path / "hf").exists()
