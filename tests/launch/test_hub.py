"""`bigtrain export --push-to-hub` against a server with the hub's interface on this machine."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from huggingface_hub import constants

from bigtrain.cli import main

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


Exported = Callable[..., tuple[int, str, str]]


@pytest.fixture
def exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Exported:
    """``exported(run, hub, *words)``: exit code and outputs of an export to ``hf``."""

    def run(run: Path, hub: Hub, *words: str, token: str = TOKEN) -> tuple[int, str, str]:
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
        monkeypatch.setenv("HF_TOKEN", token)
        output = str(tmp_path / "hf")
        capfd.readouterr()
        code = main(["export", "--run", str(run), "--output", output, *words])
        said = capfd.readouterr()
        assert "Traceback" not in said.err
        assert TOKEN not in said.out + said.err
        return code, said.out, said.err

    return run


@pytest.mark.distributed
def test_what_was_verified_is_what_is_sent(
    exported: Exported, finished_run: Path, tmp_path: Path
) -> None:
    with served(Hub()) as hub:
        code, out, error = exported(finished_run, hub, "--push-to-hub", NAME, "--private")
    assert code == 0, error
    verified, pushed = out.partition("\nnext:")[0].splitlines()[-2:]
    assert "same logits" in verified
    assert pushed == f"pushed to {hub.address}/{NAME}"
    here = {str(p.relative_to(tmp_path / "hf")): p for p in (tmp_path / "hf").rglob("*")}
    assert hub.files == {name: path.read_bytes() for name, path in here.items()}
    assert {"model.safetensors", "config.json", "README.md"} <= hub.files.keys()
    (made,) = hub.made
    assert (made["name"], made["organization"], made["visibility"]) == ("model", "me", "private")
    assert hub.messages[0].startswith("Step ")


@pytest.mark.distributed
def test_a_hub_that_refuses_costs_nothing(
    exported: Exported, finished_run: Path, tmp_path: Path
) -> None:
    with served(Hub(takes_commits=False)) as hub:
        code, _, error = exported(finished_run, hub, "--push-to-hub", NAME)
    assert code == 2
    assert f"is written and verified, and was not pushed to {NAME}: " in error
    assert f"-> hf upload {NAME} {tmp_path / 'hf'}" in error
    assert (tmp_path / "hf" / "model.safetensors").exists()


def test_refused_before_anything_is_written(exported: Exported, tmp_path: Path) -> None:
    nowhere = Hub(address="http://127.0.0.1:9")
    with served(Hub()) as hub:
        for words, at, token, said in (
            (["--push-to-hub", "a/b/c"], hub, TOKEN, "is not a repository name -> OWNER/NAME"),
            (["--push-to-hub", NAME], hub, "", "not logged in -> hf auth login"),
            (["--push-to-hub", NAME], hub, "hf_other", "answers 401 to the"),
            (["--push-to-hub", NAME], nowhere, TOKEN, f"{nowhere.address} cannot be reached"),
            (["--private"], hub, TOKEN, "--private: applies to a repository, but none is"),
        ):
            code, _, error = exported(tmp_path / "no run", at, *words, token=token)
            assert code == 2
            assert said in error
            assert not (tmp_path / "hf").exists()
    assert hub.made == []
