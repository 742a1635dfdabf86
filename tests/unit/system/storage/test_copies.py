"""Directories copied to a bucket and back, over lines that break; runs, tokenizers and models."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import fsspec
import pytest

from bigtrain.cli import main
from bigtrain.system.storage import copies, object_store, stores
from bigtrain.system.storage.copies import (
    MARK,
    copy_tree,
    fetch_tree,
    fetched_copy,
    list_tree,
    local_copy,
)
from bigtrain.system.storage.local_path import local_path
from bigtrain.system.storage.stores import NotFoundError, RemoteStat, RetryPolicy, StorageError
from tests.support.remote_servers import S3_VARIABLES, BreakingLine, s3_server

CONTENT = random.Random(2).randbytes(2_500_000)


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    soon = RetryPolicy(tries=4, sleep=lambda seconds: None)
    monkeypatch.setattr(stores, "RETRIES", soon)
    monkeypatch.setenv("BIGTRAIN_CACHE", str(tmp_path / "cache"))
    fetched_copy.cache_clear()


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BreakingLine]:
    """To an S3 server of the folder ``server`` with the bucket ``bucket``; no break yet."""
    (tmp_path / "server/bucket").mkdir(parents=True)
    with ExitStack() as stack:
        breaking_line = BreakingLine(stack.enter_context(s3_server(tmp_path / "server")), [])
        port = stack.enter_context(breaking_line.running())
        for name, value in S3_VARIABLES.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        yield breaking_line


def tree(directory: Path, *without: str) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name not in without
    }


def checkpoint(run: Path, step: int) -> Path:
    path = run / f"checkpoints/step-{step:08d}"
    (path / "tensors").mkdir(parents=True)
    (path / "tensors/rank-00000.safetensors").write_bytes(CONTENT[: 1_000_000 + step])
    (path / "state.json").write_text("{}")
    (path / "manifest.json").write_text(f'{{"step": {step}}}')
    return path


def test_there_and_back(line: BreakingLine, tmp_path: Path) -> None:
    run = tmp_path / "run"
    place = checkpoint(run, 4)
    address = "s3://bucket/runs/mine/checkpoints/step-00000004"
    assert copy_tree(place, address, "manifest.json") == sum(map(len, tree(place).values()))
    assert copy_tree(place, address, "manifest.json") == 0
    assert tree(tmp_path / "server/bucket/runs/mine", MARK) == tree(run)
    line.breaks = (line.passed + 300_000, line.passed + 700_000)
    back = tmp_path / "back"
    assert fetch_tree("s3://bucket/runs/mine", back) == sum(map(len, tree(run).values()))
    assert line.broken == 2
    assert tree(back, ".fetched.json") == tree(run)
    assert fetch_tree("s3://bucket/runs/mine", back) == 0


def test_a_copy_that_stopped_goes_on(
    line: BreakingLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = checkpoint(tmp_path / "run", 4)
    store = copies.store_of("s3://bucket")
    sent: list[str] = []

    def put(self: object, address: str, content: Path | bytes) -> None:
        if isinstance(content, Path):  # not the mark of a copy
            if content.name == "manifest.json" and len(sent) < 3:
                raise StorageError("the server is full")
            sent.append(content.name)
        original(store, address, content)

    original = object_store.ObjectStore.put
    monkeypatch.setattr(object_store.ObjectStore, "put", put)
    with pytest.raises(StorageError, match="full"):
        copy_tree(place, "s3://bucket/c", "manifest.json")
    # Without its last file it is no checkpoint.
    assert (
        copies.checkpoint_steps([f"checkpoints/step-4/{n}" for n in list_tree("s3://bucket/c")])
        == []
    )
    sent.append("the server has room again")
    assert (
        copy_tree(place, "s3://bucket/c", "manifest.json")
        == (place / "manifest.json").stat().st_size
    )
    assert sent[-1] == "manifest.json"
    # Files of the same size that another copy left are not taken for these.
    (place / "manifest.json").write_text('{"step": 5}')
    assert copy_tree(place, "s3://bucket/c", "manifest.json") == sum(map(len, tree(place).values()))


def test_a_fetch_that_stopped_goes_on_at_its_byte(
    line: BreakingLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "server/bucket/m/model.bin"
    file.parent.mkdir()
    file.write_bytes(CONTENT)
    line.breaks = tuple(1_200_000 for _ in range(12))  # again and again at once
    with pytest.raises(StorageError, match=r"m/model\.bin cannot be read beyond byte 1,"):
        fetch_tree("s3://bucket/m", tmp_path / "back")
    (draft,) = (tmp_path / "back").glob("model.bin.*.partial")
    had = draft.stat().st_size
    assert had > 1_000_000
    line.breaks = ()
    line.broken = 0
    assert fetch_tree("s3://bucket/m", tmp_path / "back") == len(CONTENT) - had
    assert (tmp_path / "back/model.bin").read_bytes() == CONTENT
    file.write_bytes(CONTENT[::-1])
    assert fetch_tree("s3://bucket/m", tmp_path / "back") == len(CONTENT)
    assert (tmp_path / "back/model.bin").read_bytes() == CONTENT[::-1]


def test_the_command_fetches_the_newest_complete_checkpoint(
    line: BreakingLine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "server/bucket/runs/mine"
    for step in (4, 8, 12):
        checkpoint(run, step)
    (run / "checkpoints/step-00000012/manifest.json").unlink()  # not all of it came
    (run / "run_id").write_text("x")
    back = tmp_path / "back"
    assert main(["fetch", "s3://bucket/runs/mine/", str(back)]) == 0
    assert f"resumes from step 8 with output.directory={back}" in capsys.readouterr().out
    names = {name for name in tree(back, ".fetched.json") if name.startswith("checkpoints")}
    assert {name.split("/")[1] for name in names} == {"step-00000008"}
    assert (back / "run_id").read_text() == "x"
    assert main(["fetch", "s3://bucket/runs/mine", str(back), "--step", "4"]) == 0
    assert (back / "checkpoints/step-00000004/manifest.json").exists()
    assert main(["fetch", "s3://bucket/runs/mine", str(back), "--step", "12"]) == 2
    assert "no complete checkpoint of step 12 -> one of 8, 4" in capsys.readouterr().err
    assert main(["fetch", "s3://bucket/none", str(back)]) == 2
    assert "s3://bucket/none: no file there" in capsys.readouterr().err
    assert main(["fetch", "runs/mine", str(back)]) == 2


def test_nothing_is_written_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files_by_name = {"../evil": RemoteStat(1, "1")}
    monkeypatch.setattr(copies, "list_tree", lambda address, wanted: files_by_name)
    with pytest.raises(StorageError, match="which is not a file name"):
        fetch_tree("memory://x", tmp_path / "back")
    assert not (tmp_path / "evil").exists()


def test_a_copy_of_this_host(tmp_path: Path) -> None:
    files = fsspec.filesystem("memory")
    files.pipe_file("/models/tiny/config.json", b"{}")
    files.pipe_file("/models/tiny/model.safetensors", CONTENT)
    small = local_copy("memory://models/tiny", weights=False)
    assert sorted(tree(small, ".fetched.json")) == ["config.json"]
    assert local_copy("memory://models/tiny") == small
    assert (small / "model.safetensors").read_bytes() == CONTENT
    shutil.rmtree(small)  # as of any cache
    assert (local_copy("memory://models/tiny") / "model.safetensors").read_bytes() == CONTENT
    assert local_path("models/tiny") == "models/tiny"
    with pytest.raises(NotFoundError):
        local_copy("memory://models/none")
