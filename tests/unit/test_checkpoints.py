"""Checkpoint directories: what makes one exist, what is found wrong with it, which ones stay."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from bigtrain.config import CheckpointSection
from bigtrain.errors import CheckpointError
from bigtrain.run import checkpoints
from bigtrain.run.retention import reasons_to_keep, retain

PAYLOAD = bytes(range(256)) * 40


def write_checkpoint(
    run: Path, step: int, *, finished: bool = True, held_out_loss: float | None = None
) -> Path:
    directory = checkpoints.partial_path(run, step, "0123abcd")
    checkpoints.prepare(directory)
    (directory / checkpoints.TENSORS / "__0_0.distcp").write_bytes(PAYLOAD)
    (directory / checkpoints.TENSORS / ".metadata").write_bytes(b"which tensor is where")
    (directory / checkpoints.STATE).write_text(
        json.dumps({"step": step, "held_out_loss": held_out_loss})
    )
    return checkpoints.commit(directory) if finished else directory


def newest(run: Path, warn: Callable[[str], None]) -> Path | None:
    return next(checkpoints.usable(run, warn), None)


def keep(last: int, **more: int) -> CheckpointSection:
    return CheckpointSection(keep_last=last, **more)


def shown(reason: str | None) -> str:
    assert reason is not None
    return reason


def test_committed_checkpoint_is_whole(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, 200)
    assert directory == tmp_path / "checkpoints" / "step-00000200"
    assert checkpoints.damage(directory, "all") is None
    assert checkpoints.steps(tmp_path) == [200]
    assert newest(tmp_path, pytest.fail) == directory
    assert checkpoints.read_state(directory) == {"step": 200, "held_out_loss": None}
    listed = json.loads((directory / checkpoints.MANIFEST).read_text())["files"]
    assert listed.keys() == {"tensors/__0_0.distcp", "tensors/.metadata", "state.json"}
    assert listed["tensors/__0_0.distcp"]["bytes"] == len(PAYLOAD)
    assert {path.name for path in directory.iterdir()} == {"tensors", "state.json", "manifest.json"}


def test_unfinished_checkpoint_does_not_exist(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, 4, finished=False)
    assert checkpoints.steps(tmp_path) == []
    assert newest(tmp_path, pytest.fail) is None
    assert shown(checkpoints.damage(directory)) == f"{directory / 'manifest.json'}: missing"
    with pytest.raises(CheckpointError, match="no checkpoint of step 4; steps: none"):
        checkpoints.find(tmp_path, 4)


def test_truncated_file_is_damage(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, 1)
    file = directory / "tensors" / "__0_0.distcp"
    file.write_bytes(PAYLOAD[:-1])
    expected = f"{file}: {len(PAYLOAD) - 1} bytes, should be {len(PAYLOAD)}"
    assert checkpoints.damage(directory) == expected


def test_flipped_byte_is_found_by_checksum_only(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, 1)
    file = directory / "tensors" / "__0_0.distcp"
    flipped = bytearray(PAYLOAD)
    flipped[5000] ^= 1
    file.write_bytes(flipped)
    assert checkpoints.damage(directory) is None
    expected = f"{file}: contents do not match their checksum"
    assert checkpoints.damage(directory, "all") == expected


@pytest.mark.parametrize("name", ["tensors/__0_0.distcp", "tensors/.metadata", "state.json"])
def test_missing_file_is_damage(tmp_path: Path, name: str) -> None:
    directory = write_checkpoint(tmp_path, 1)
    (directory / name).unlink()
    assert checkpoints.damage(directory) == f"{directory / name}: missing"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not json",
        "[1, 2]",
        "3",
        '{"format": 1}',
        '{"format": 1, "files": 7}',
        '{"format": 1, "files": {"state.json": 3, "tensors/.metadata": 3}}',
        '{"format": 1, "files": {"state.json": {}, "tensors/.metadata": {}}}',
        "\udcff",
    ],
)
def test_manifest_of_garbage_is_damage(tmp_path: Path, text: str) -> None:
    directory = write_checkpoint(tmp_path, 1)
    manifest = directory / checkpoints.MANIFEST
    manifest.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert shown(checkpoints.damage(directory)).startswith(f"{manifest}: unreadable (")


def test_manifest_of_a_later_format_is_refused(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, 1)
    manifest = directory / checkpoints.MANIFEST
    document = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**document, "format": 2}))
    assert checkpoints.damage(directory) == f"{manifest}: format 2, this is format 1"


def test_newest_valid_passes_over_damage_and_says_so(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        write_checkpoint(tmp_path, step)
    (checkpoints.checkpoint_path(tmp_path, 40) / "state.json").unlink()
    (checkpoints.checkpoint_path(tmp_path, 30) / "manifest.json").write_text("{")
    write_checkpoint(tmp_path, 50, finished=False)
    said: list[str] = []
    assert newest(tmp_path, said.append) == checkpoints.checkpoint_path(tmp_path, 20)
    assert len(said) == 2
    assert "checkpoint of step 40 is damaged and passed over" in said[0]
    assert "state.json: missing" in said[0]
    assert "checkpoint of step 30 is damaged and passed over" in said[1]


def test_find_names_what_there_is(tmp_path: Path) -> None:
    for step in (10, 20):
        write_checkpoint(tmp_path, step)
    assert checkpoints.find(tmp_path, None) == checkpoints.checkpoint_path(tmp_path, 20)
    assert checkpoints.find(tmp_path, 10) == checkpoints.checkpoint_path(tmp_path, 10)
    with pytest.raises(CheckpointError, match="no checkpoint of step 15; steps: 10, 20"):
        checkpoints.find(tmp_path, 15)
    (checkpoints.checkpoint_path(tmp_path, 20) / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"checkpoint of step 20 is damaged: .*state\.json"):
        checkpoints.find(tmp_path, 20)
    (checkpoints.checkpoint_path(tmp_path, 10) / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match="holds no usable checkpoint; checkpoint of step 20"):
        checkpoints.find(tmp_path, None)


def test_find_in_a_directory_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere: holds no usable checkpoint$"):
        checkpoints.find(tmp_path / "nowhere", None)


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_state_must_be_an_object(tmp_path: Path, text: str) -> None:
    directory = write_checkpoint(tmp_path, 1)
    (directory / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"state\.json: "):
        checkpoints.read_state(directory)


@pytest.mark.parametrize(("keep_last", "left"), [(1, [40]), (2, [30, 40]), (9, [10, 20, 30, 40])])
def test_retain_keeps_the_newest(tmp_path: Path, keep_last: int, left: list[int]) -> None:
    for step in (10, 40, 20, 30):
        write_checkpoint(tmp_path, step)
    retain(tmp_path, 40, keep(keep_last))
    assert checkpoints.steps(tmp_path) == left
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {f"step-{step:08d}" for step in left}


def test_retain_removes_what_unfinished_saves_left(tmp_path: Path) -> None:
    kept = write_checkpoint(tmp_path, 10)
    write_checkpoint(tmp_path, 20, finished=False)
    (tmp_path / "checkpoints" / "notes.txt").write_text("not ours")
    retain(tmp_path, 10, keep(1))
    assert checkpoints.damage(kept, "all") is None
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {
        "notes.txt",
        "step-00000010",
    }


def test_retain_never_gives_up_what_was_just_saved(tmp_path: Path) -> None:
    """A run that went on from step 8, past a damaged step 12, and saved step 10."""
    for step in (8, 10, 12):
        write_checkpoint(tmp_path, step)
    (checkpoints.checkpoint_path(tmp_path, 12) / "state.json").unlink()
    retain(tmp_path, 10, keep(1))
    assert checkpoints.steps(tmp_path) == [10]


def test_commit_replaces_a_damaged_checkpoint_of_the_step(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, 10)
    (directory / "state.json").unlink()
    assert write_checkpoint(tmp_path, 10) == directory
    assert checkpoints.damage(directory, "all") is None
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]


def test_commit_refuses_files_that_are_not_what_was_written(tmp_path: Path) -> None:
    partial = write_checkpoint(tmp_path, 10, finished=False)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: 10240 bytes on .* 99 bytes"):
        checkpoints.commit(partial, {"__0_0.distcp": (99, "0" * 16)})
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp: missing on the main .* share"):
        checkpoints.commit(partial, {"__1_0.distcp": (99, "0" * 16)})
    assert checkpoints.steps(tmp_path) == []


def test_removal_renames_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_checkpoint(tmp_path, 10)
    rmtree = shutil.rmtree

    def killed(path: Path, **_: object) -> None:
        if path.exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.remove(directory)
    assert checkpoints.steps(tmp_path) == []
    [left] = directory.parent.iterdir()
    assert (left / "tensors" / "__0_0.distcp").exists()
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    checkpoints.clear_garbage(tmp_path)
    assert list(directory.parent.iterdir()) == []


def test_reasons_to_keep() -> None:
    held_out = {10: 3.0, 20: 1.5, 30: None, 40: 2.0, 50: 2.5, 60: 2.25}
    section = keep(2, keep_every_steps=30, keep_best=2)
    assert reasons_to_keep(held_out, section) == {
        60: ["newest", "every 30 steps"],
        50: ["one of the last 2"],
        30: ["every 30 steps"],
        20: ["held-out loss 1.5000"],
        40: ["held-out loss 2.0000"],
    }
    assert reasons_to_keep({}, section) == {}


def test_retain_keeps_the_best_and_what_stays_for_good(tmp_path: Path) -> None:
    for step, loss in ((10, 3.0), (20, 1.5), (30, 2.0), (40, 2.5), (50, float("nan"))):
        write_checkpoint(tmp_path, step, held_out_loss=loss)
    retain(tmp_path, 50, keep(1, keep_every_steps=40, keep_best=1))
    assert checkpoints.steps(tmp_path) == [20, 40, 50]


def test_retain_keeps_what_a_run_may_go_back_to(tmp_path: Path) -> None:
    for step, streak in ((10, 0), (20, 0), (30, 3), (40, 13)):
        state = write_checkpoint(tmp_path, step, finished=False) / checkpoints.STATE
        state.write_text(json.dumps({"step": step, "guard": {"streak": streak}}))
        checkpoints.commit(state.parent)
    retain(tmp_path, 40, keep(1))
    assert checkpoints.steps(tmp_path) == [20, 40]
    reasons = reasons_to_keep({20: None, 40: None}, keep(1), 20)
    assert reasons == {40: ["newest"], 20: ["newest before bad steps"]}


def test_retain_counts_whole_checkpoints_only(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        write_checkpoint(tmp_path, step)
    for step in (20, 30):
        (checkpoints.checkpoint_path(tmp_path, step) / "state.json").unlink()
    retain(tmp_path, 40, keep(2, keep_every_steps=20))
    assert checkpoints.steps(tmp_path) == [10, 20, 40]


@pytest.mark.parametrize("missing", ["state.json", "tensors/.metadata"])
def test_manifest_that_lists_too_little_is_damage(tmp_path: Path, missing: str) -> None:
    manifest = write_checkpoint(tmp_path, 1) / checkpoints.MANIFEST
    document = json.loads(manifest.read_text())
    del document["files"][missing]
    manifest.write_text(json.dumps(document))
    assert checkpoints.damage(manifest.parent) == f"{manifest}: does not list {missing}"


def test_steps_of_more_digits_are_in_order(tmp_path: Path) -> None:
    for step in (5, 123_456_789, 99_999_999):
        write_checkpoint(tmp_path, step)
    (tmp_path / "checkpoints" / "step-7").mkdir()
    (tmp_path / "checkpoints" / "step-00000007.partial-0123abcd").mkdir()
    assert checkpoints.steps(tmp_path) == [5, 99_999_999, 123_456_789]
