"""Files of a dataset's repository on the hub, by hf://, from a server with the hub's interface."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.support.chats import save_chat_tokenizer
from tests.support.remote_servers import BreakingLine, WebServer, serving
from tests.support.worlds import ROOT

REPOSITORY = "/api/datasets/me/texts"


def hub_of(site: WebServer) -> type[BaseHTTPRequestHandler]:
    """Its repository ``me/texts`` has the files of ``site.folder``."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Nothing on the screen."""

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            files = sorted(site.folder.iterdir())
            listed = [
                {
                    "type": "file",
                    "path": file.name,
                    "size": file.stat().st_size,
                    "oid": hashlib.sha1(file.read_bytes()).hexdigest(),
                }
                for file in files
            ]
            if path.startswith(f"{REPOSITORY}/tree/"):
                self.answer(listed)
            elif path.startswith(REPOSITORY):
                self.answer({"id": "me/texts", "sha": "0" * 40, "siblings": []})
            else:
                self.path = path.rpartition("/")[2]
                site.answer(self)

        def answer(self, tree: object) -> None:
            body = json.dumps(tree).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler


@pytest.mark.slow
def test_the_same_bytes_as_from_disk(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    lines = "".join(json.dumps({"text": f"text {number} " * 40}) + "\n" for number in range(2000))
    (tmp_path / "files/a.jsonl").write_text(lines)
    tokenizer = save_chat_tokenizer(tmp_path / "tokenizer")
    with serving(hub_of(WebServer(tmp_path / "files"))) as port:
        line = BreakingLine(port, (400_000, 700_000))
        with line.running() as way:
            environment = {
                **{name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"},
                "HF_ENDPOINT": f"http://127.0.0.1:{way}",
                "HF_HOME": str(tmp_path / "home"),
                "PYTHONPATH": str(ROOT),
            }
            for number, place in enumerate(
                (str(tmp_path / "files/a.jsonl"), "hf://datasets/me/texts/a.jsonl")
            ):
                words = ["tokenize", "--input", place, "--tokenizer", str(tokenizer)]
                words += ["--output", str(tmp_path / str(number)), "--shard-size", "300kB"]
                result = subprocess.run(
                    [sys.executable, "-m", "bigtrain.cli", *words],
                    env=environment,
                    capture_output=True,
                    text=True,
                )
                assert result.returncode == 0, result.stderr
    assert line.broken == 2
    shards = [
        {path.name: path.read_bytes() for path in (tmp_path / name).glob("train-*")}
        for name in ("0", "1")
    ]
    assert shards[0] == shards[1]
    assert len(shards[0]) > 3
    source = json.loads((tmp_path / "1/manifest.json").read_text())["sources"][0]
    assert source["path"] == "hf://datasets/me/texts/a.jsonl"
    assert source["revision"] == hashlib.sha1(lines.encode()).hexdigest()
