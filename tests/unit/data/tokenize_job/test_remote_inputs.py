"""Inputs at addresses give the dataset that they give on a disk, over lines that break."""

from __future__ import annotations

import bz2
import gzip
import json
import os
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pytest
import zstandard
from pyarrow import csv, parquet

from bigtrain.cli import main
from bigtrain.data.documents.discovery import is_pattern
from bigtrain.system.storage import stores
from bigtrain.system.storage.stores import RetryPolicy
from tests.support.chats import save_chat_tokenizer
from tests.support.remote_servers import S3_VARIABLES, BreakingLine, WebServer, s3_server

NAMES = (
    *("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet", "e.arrow", "f.csv", "g.json"),
    *("h.txt", "i.parquet.gz", "j.ndjson.bz2"),
)
FOLDER_OPTIONS = [f"--suffix={suffix}" for suffix in (".txt", *(".jsonl .parquet .csv".split()))]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of one bucket, with the same 270 kB of text in files of every kind."""
    folder = tmp_path_factory.mktemp("server") / "bucket/data"
    folder.mkdir(parents=True)
    chance = random.Random(5)
    words = "the quick brown fox jumps over the lazy dog 東京 naïve".split()
    texts = [" ".join(chance.choices(words, k=chance.randrange(5, 200))) for _ in range(400)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    table = pa.table({"text": texts})
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
    (folder / "c.jsonl.zst").write_bytes(zstandard.compress(lines))
    parquet.write_table(table, folder / "d.parquet", row_group_size=200)
    with pa.OSFile(str(folder / "e.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as w:
        w.write_table(table, max_chunksize=200)
    csv.write_csv(table, folder / "f.csv")
    (folder / "g.json").write_text(json.dumps([{"text": text} for text in texts]))
    (folder / "h.txt").write_text(texts[0])
    (folder / "i.parquet.gz").write_bytes(gzip.compress((folder / "d.parquet").read_bytes()))
    (folder / "j.ndjson.bz2").write_bytes(bz2.compress(lines))
    return folder


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as exit_stack:
        yield exit_stack


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    soon = RetryPolicy(tries=4, sleep=lambda seconds: None)
    monkeypatch.setattr(stores, "RETRIES", soon)
    for name, value in S3_VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def serve(
    kind: str, bucket: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, *breaks: int
) -> tuple[str, BreakingLine]:
    """The address of the folder, behind a line that breaks."""
    root = bucket.parents[1]
    server = s3_server(root) if kind == "s3" else WebServer(root, password="letmein").running()
    line = BreakingLine(stack.enter_context(server), breaks)
    port = stack.enter_context(line.running())
    if kind == "http":
        return f"http://me:letmein@127.0.0.1:{port}/bucket/data", line
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    return "s3://bucket/data", line


def tokenize(tokenizer: Path, output: Path, inputs: list[str], *options: str) -> int:
    words = ["tokenize", "--input", *inputs, "--tokenizer", str(tokenizer), "--output", str(output)]
    return main([*words, "--shard-size", "100kB", "--workers", "1", *options])


def shards(output: Path) -> dict[str, bytes]:
    files = [path for path in output.iterdir() if path.suffix in (".bin", ".idx", ".blocks")]
    return {path.name: path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def local(tokenizer: Path, bucket: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("local") / "shards"
    assert tokenize(tokenizer, output, [str(bucket / name) for name in NAMES]) == 0
    return output


@pytest.mark.parametrize(
    ("kind", "workers"), [pytest.param("http", "2", marks=pytest.mark.slow), ("s3", "1")]
)
def test_the_same_bytes_as_from_disk(
    kind: str,
    workers: str,
    tokenizer: Path,
    bucket: Path,
    local: Path,
    tmp_path: Path,
    stack: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    address, line = serve(kind, bucket, stack, monkeypatch, 300_000, 900_000)
    inputs = [f"{address}/{name}" for name in NAMES]
    if kind == "http":
        inputs[0] += "?token=hidden&page=1"
    output = tmp_path / "shards"
    assert tokenize(tokenizer, output, inputs, "--workers", workers) == 0
    assert line.broken == 2
    assert shards(output) == shards(local)
    manifest = (output / "manifest.json").read_text()
    first = json.loads(manifest)["sources"][0]
    assert first["path"].endswith("data/a.jsonl?page=1" if kind == "http" else "data/a.jsonl")
    assert first["revision"]
    assert first["bytes"] == (bucket / "a.jsonl").stat().st_size
    if kind == "http":
        # Signed anew it is the same file, and nothing is to be done.
        inputs[0] = inputs[0].replace("hidden", "other")
        assert tokenize(tokenizer, output, inputs) == 0
    printed = capsys.readouterr()
    assert kind != "http" or "nothing to do" in printed.out
    said = printed.out + printed.err + manifest
    for secret in ("letmein", "hidden", "other&", S3_VARIABLES["AWS_SECRET_ACCESS_KEY"]):
        assert secret not in said


def test_folders_and_globs_of_a_bucket(
    tokenizer: Path,
    bucket: Path,
    tmp_path: Path,
    stack: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    address, _ = serve("s3", bucket, stack, monkeypatch)
    options = [*FOLDER_OPTIONS, "--exclude", "c.*"]
    assert tokenize(tokenizer, tmp_path / "0", [str(bucket)], *options) == 0
    assert tokenize(tokenizer, tmp_path / "1", [address], *options) == 0
    assert shards(tmp_path / "0") == shards(tmp_path / "1")
    assert tokenize(tokenizer, tmp_path / "2", [str(bucket / "[ab].jsonl*")]) == 0
    assert tokenize(tokenizer, tmp_path / "3", ["s3://bucket/**/[ab].jsonl*"]) == 0
    assert shards(tmp_path / "2") == shards(tmp_path / "3")
    assert is_pattern("s3://bucket/[ab].jsonl")
    assert not is_pattern("https://host/a%5B1%5D.jsonl?page=[1]")
    assert tokenize(tokenizer, tmp_path / "4", [f"{address}/*.none"]) != 0
    assert "no file there" in capsys.readouterr().err
    assert tokenize(tokenizer, tmp_path / "4", ["s3://bucket/nothing"]) != 0
    assert "s3://bucket/nothing: no file there" in capsys.readouterr().err


def test_begun_again_and_changed(
    tokenizer: Path,
    bucket: Path,
    tmp_path: Path,
    stack: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A server that is gone leaves what was finished; a file that changed is another input."""
    root = tmp_path / "root"
    (root / "bucket/data").mkdir(parents=True)
    file = root / "bucket/data/a.jsonl"
    file.write_bytes((bucket / "a.jsonl").read_bytes() * 2)
    site = WebServer(root)
    port = stack.enter_context(site.running())
    address = f"http://127.0.0.1:{port}/bucket/data/a.jsonl"
    answer, output = site.answer, tmp_path / "shards"
    units = 0

    def failing(request: object) -> None:
        nonlocal units
        units += 1
        if units > 9:
            raise ConnectionError
        answer(request)  # type: ignore[arg-type]

    monkeypatch.setattr(site, "answer", failing)
    assert tokenize(tokenizer, output, [address]) != 0
    assert "after 4 attempts" in (said := capsys.readouterr().err)
    assert "finished parts are kept" in said
    done = {path.name for path in (output / ".units").glob("*.json")}
    assert done
    monkeypatch.setattr(site, "answer", answer)
    site.requests.clear()
    assert tokenize(tokenizer, output, [address]) == 0
    assert tokenize(tokenizer, tmp_path / "disk", [str(file)]) == 0
    assert shards(output) == shards(tmp_path / "disk")
    # Of what was finished nothing is read again.
    begins = {int(asked[6:].partition("-")[0]) for _, asked in site.requests if asked}
    size = file.stat().st_size
    assert len(begins) < -(-size // 100_000) + 2
    file.write_bytes(file.read_bytes().replace(b"quick", b"slow "))
    assert tokenize(tokenizer, output, [address]) != 0
    assert "a dataset of other input files" in capsys.readouterr().err


def test_other_file_systems(tokenizer: Path, bucket: Path, local: Path, tmp_path: Path) -> None:
    import fsspec

    fsspec.filesystem("memory").put(str(bucket), "/data", recursive=True)
    inputs = [f"memory://data/{name}" for name in NAMES]
    assert tokenize(tokenizer, tmp_path / "shards", inputs) == 0
    assert shards(tmp_path / "shards") == shards(local)


@pytest.mark.parametrize(
    "name",
    ["a.jsonl", *(pytest.param(n, marks=pytest.mark.slow) for n in ("b.jsonl.gz", "d.parquet"))],
)
def test_standard_input(
    name: str,
    tokenizer: Path,
    bucket: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    read_as = [] if name == "a.jsonl" else ["--read-as", name[1:]]
    whole = ["--shard-size", "1GB", "--encoder", "reference"]
    assert tokenize(tokenizer, tmp_path / "0", [str(bucket / name)], *whole) == 0
    before = os.dup(0)
    try:
        with (bucket / name).open("rb") as file:
            os.dup2(file.fileno(), 0)
        words = [*whole, *read_as, "--workers", "2"]
        assert tokenize(tokenizer, tmp_path / "1", ["-"], *words) == 0
        assert shards(tmp_path / "0") == shards(tmp_path / "1")
        capsys.readouterr()
        # What it holds now nobody knows.
        assert tokenize(tokenizer, tmp_path / "1", ["-"], *words) != 0
        assert "a dataset of other input files" in capsys.readouterr().err
        ranks = ["--rank", "0", "--world-size", "2"]
        assert tokenize(tokenizer, tmp_path / "2", ["-"], *words, *ranks) != 0
        assert "--input - is read by one command" in capsys.readouterr().err
    finally:
        os.dup2(before, 0)
        os.close(before)
