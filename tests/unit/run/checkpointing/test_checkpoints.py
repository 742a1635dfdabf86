"""Checkpoint directories: what makes one exist, what is found wrong with it, which ones stay."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from bigtrain.engine.checkpoint.tensor_file import NewPart, SaveIdentity, write_parts
from bigtrain.engine.checkpoint.tensor_files import find_parts
from bigtrain.errors import CheckpointError, CorruptCheckpointError
from bigtrain.run.checkpointing import checkpoints
from bigtrain.run.checkpointing.retention import reasons_to_keep, retain
from bigtrain.settings.run_config import BestSection, CheckpointSection
from bigtrain.system.boxes import Box

PAYLOAD = bytes(range(256)) * 40
SHAPE = (len(PAYLOAD),)
RUN, OTHER_RUN = "0123456789abcdef", "fedcba9876543210"
FILE = "rank-00000.safetensors"


def write_checkpoint(
    run: Path, step: int, *, finished: bool = True, held_out_loss: float | None = None
) -> Path:
    directory = checkpoints.partial_path(run, step, "0123abcd")
    checkpoints.prepare(directory)
    write_state(directory, step, held_out_loss=held_out_loss)
    return commit(directory, step) if finished else directory


def write_state(directory: Path, step: int, **more: object) -> None:
    state = {"run": RUN, "step": step, **more}
    (directory / checkpoints.STATE).write_text(json.dumps(state))


def commit(partial: Path, step: int) -> Path:
    """With one file of one tensor, of `PAYLOAD`."""
    identity = SaveIdentity(RUN, step, "0123abcd")
    part = NewPart("m/a", SHAPE, Box.full(SHAPE), "U8", lambda: memoryview(PAYLOAD))
    written = {FILE: write_parts(partial / checkpoints.TENSORS / FILE, identity, 0, [part])}
    return checkpoints.commit(partial, written, identity)


def rewrite(manifest: Path, **changes: object) -> None:
    """Change the manifest as someone who knows its checksum."""
    document = {**json.loads(manifest.read_text()), **changes}
    del document["xxh3"]
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    checksum = xxhash.xxh3_64_hexdigest(text.encode())
    manifest.write_text(json.dumps({**document, "xxh3": checksum}))


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
    assert checkpoints.find_corruption(directory, "all") is None
    assert checkpoints.list_steps(tmp_path) == [200]
    assert newest(tmp_path, pytest.fail) == directory
    assert checkpoints.read_state(directory) == {"run": RUN, "step": 200, "held_out_loss": None}
    listed = json.loads((directory / checkpoints.MANIFEST).read_text())["files"]
    assert listed.keys() == {f"tensors/{FILE}", "state.json"}
    assert listed[f"tensors/{FILE}"]["bytes"] > len(PAYLOAD)
    assert {path.name for path in directory.iterdir()} == {"tensors", "state.json", "manifest.json"}


def test_unfinished_checkpoint_does_not_exist(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, 4, finished=False)
    assert checkpoints.list_steps(tmp_path) == []
    assert newest(tmp_path, pytest.fail) is None
    assert (
        shown(checkpoints.find_corruption(directory)) == f"{directory / 'manifest.json'}: missing"
    )
    with pytest.raises(CheckpointError, match="no checkpoint of step 4; steps: none"):
        checkpoints.find(tmp_path, 4)


def test_flipped_byte_is_found_by_checksum_only(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, 1)
    file = directory / "tensors" / FILE
    flipped = bytearray(file.read_bytes())
    flipped[-5000] ^= 1
    file.write_bytes(flipped)
    assert checkpoints.find_corruption(directory) is None
    expected = f"{file}: contents do not match their checksum"
    assert checkpoints.find_corruption(directory, "all") == expected


def listed(directory: Path, without: str) -> dict[str, object]:
    files: dict[str, object] = checkpoints_manifest(directory)["files"]
    return {name: file for name, file in files.items() if name != without}


def checkpoints_manifest(directory: Path) -> Any:
    return json.loads((directory / checkpoints.MANIFEST).read_text())


MANIFEST, ONE = checkpoints.MANIFEST, {"bytes": 1, "xxh3": "0"}
PICKLED = b'{"format": 1, "files": {"tensors/.metadata": {"bytes": 1, "xxh3": "0"}}}'
DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (
        lambda d: os.truncate(d / "tensors" / FILE, (d / "tensors" / FILE).stat().st_size - 1),
        rf"tensors/{FILE}: (\d+) bytes, should be (?!\1)\d+$",
    ),
    (lambda d: (d / "tensors" / FILE).unlink(), f"tensors/{FILE}: missing$"),
    (lambda d: (d / "state.json").unlink(), r"state\.json: missing$"),
    (lambda d: rewrite(d / MANIFEST, format=3), "manifest.json: format 3, this is format 2$"),
    (
        lambda d: (d / MANIFEST).write_bytes(PICKLED),
        "manifest.json: format 1, whose pickle index is no longer supported, this is format 2 -> ",
    ),
    (
        lambda d: (d / MANIFEST).write_bytes(
            (d / MANIFEST).read_bytes().replace(b"0123abcd", b"0123abce")
        ),
        "manifest.json: contents do not match their checksum$",
    ),
    *(
        (
            lambda d, name=name: rewrite(d / MANIFEST, files=listed(d, name)),
            f"manifest.json: does not list {name.removesuffix(FILE)}$",
        )
        for name in ("state.json", f"tensors/{FILE}")
    ),
    *(
        (lambda d, text=text: (d / MANIFEST).write_bytes(text), r"manifest.json: unreadable \(")
        for text in (b"", b"not json", b"[1, 2]", b"3", b'{"format": 2}', b"[" * 100_000, b"\xff")
    ),
    *(
        (lambda d, files=files: rewrite(d / MANIFEST, files=files), r"manifest.json: unreadable \(")
        for files in (
            *({"state.json": 3}, {"state.json": ONE, f"tensors/{FILE}": ONE}, [], 7),
            {"state.json": {"bytes": "one", "xxh3": "0"}},
            *({"../state.json": ONE}, {"/etc/shadow": ONE}),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "words"), DAMAGE, ids=range(len(DAMAGE)))
def test_damage_is_named(damage: Callable[[Path], object], words: str, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, 1)
    damage(directory)
    said = shown(checkpoints.find_corruption(directory))
    assert re.match(f"{re.escape(str(directory))}/{words}", said), said


def test_an_older_checkpoint_under_a_newer_name_is_damage(tmp_path: Path) -> None:
    older = write_checkpoint(tmp_path, 10)
    newer = checkpoints.checkpoint_path(tmp_path, 20)
    shutil.copytree(older, newer)
    expected = f"{newer / 'manifest.json'}: is of step 10, unlike step-00000020"
    assert checkpoints.find_corruption(newer, "none") == expected
    rewrite(newer / "manifest.json", step=20)
    expected = (
        f"{newer / 'state.json'}: is of run {RUN}, step 10, the manifest of run {RUN}, step 20"
    )
    assert checkpoints.find_corruption(newer) == expected
    said: list[str] = []
    assert newest(tmp_path, said.append) == older
    assert len(said) == 1


def test_a_tensor_file_of_another_step_is_damage(tmp_path: Path) -> None:
    older, newer = write_checkpoint(tmp_path, 10), write_checkpoint(tmp_path, 20)
    file = newer / "tensors" / FILE
    shutil.copyfile(older / "tensors" / FILE, file)
    assert file.stat().st_size == (older / "tensors" / FILE).stat().st_size
    assert (
        checkpoints.find_corruption(newer, "all") == f"{file}: contents do not match their checksum"
    )
    files = json.loads((older / "manifest.json").read_text())["files"]
    state = json.loads((newer / "manifest.json").read_text())["files"]["state.json"]
    rewrite(newer / "manifest.json", files={**files, "state.json": state})
    expected = f"{file}: is of run {RUN}, step 10, and not of run {RUN}, step 20"
    assert checkpoints.find_corruption(newer, "all") == expected
    with pytest.raises(CorruptCheckpointError, match=expected):
        find_parts(newer / "tensors", checkpoints.list_tensors(newer))


def test_starts_that_overlap_agree_on_the_run_s_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that looked before the other had written, and goes on after it."""
    first = checkpoints.make_run_id(tmp_path)
    looks = iter([None])
    monkeypatch.setattr(checkpoints, "read_run_id", lambda _directory: next(looks, first))
    assert checkpoints.make_run_id(tmp_path) == first
    assert [path.name for path in tmp_path.iterdir()] == [checkpoints.RUN_ID]
    assert (tmp_path / checkpoints.RUN_ID).read_text() == f"{first}\n"


def test_a_corrupt_run_id_is_written_anew(tmp_path: Path) -> None:
    (tmp_path / checkpoints.RUN_ID).write_text("not an id")
    own = checkpoints.make_run_id(tmp_path)
    assert (tmp_path / checkpoints.RUN_ID).read_text() == f"{own}\n"


def test_a_checkpoint_of_another_run_is_damage(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "run", 10)
    assert checkpoints.find_corruption(directory) is None
    assert checkpoints.make_run_id(tmp_path / "run") == RUN  # as its checkpoints say
    assert checkpoints.make_run_id(tmp_path / "run") == RUN
    assert checkpoints.find_corruption(directory) is None
    own = checkpoints.make_run_id(tmp_path / "other")
    assert own != RUN
    copy = checkpoints.checkpoint_path(tmp_path / "other", 10)
    shutil.copytree(directory, copy)
    said = shown(checkpoints.find_corruption(copy))
    assert (
        f"{copy / 'manifest.json'}: is of run {RUN}, but {tmp_path}/other/run_id is {own}" in said
    )
    (tmp_path / "other" / "run_id").unlink()
    assert checkpoints.find_corruption(copy) is None


def test_newest_valid_passes_over_damage_and_says_so(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        write_checkpoint(tmp_path, step)
    (checkpoints.checkpoint_path(tmp_path, 40) / "state.json").unlink()
    (checkpoints.checkpoint_path(tmp_path, 30) / "manifest.json").write_text("{")
    write_checkpoint(tmp_path, 50, finished=False)
    said: list[str] = []
    assert newest(tmp_path, said.append) == checkpoints.checkpoint_path(tmp_path, 20)
    assert len(said) == 2
    assert "skipping corrupt checkpoint at step 40" in said[0]
    assert "state.json: missing" in said[0]
    assert "skipping corrupt checkpoint at step 30" in said[1]


def test_find_names_what_there_is(tmp_path: Path) -> None:
    for step in (10, 20):
        write_checkpoint(tmp_path, step)
    assert checkpoints.find(tmp_path, None) == checkpoints.checkpoint_path(tmp_path, 20)
    assert checkpoints.find(tmp_path, 10) == checkpoints.checkpoint_path(tmp_path, 10)
    with pytest.raises(CheckpointError, match="no checkpoint of step 15; steps: 10, 20"):
        checkpoints.find(tmp_path, 15)
    with pytest.raises(CheckpointError, match=r"nowhere: no such directory -> name a run"):
        checkpoints.find(tmp_path / "nowhere", None)
    (checkpoints.checkpoint_path(tmp_path, 20) / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"checkpoint of step 20 is corrupt: .*state\.json"):
        checkpoints.find(tmp_path, 20)
    said: list[str] = []
    older = checkpoints.find(tmp_path, None, warn=said.append)
    assert older == checkpoints.checkpoint_path(tmp_path, 10)
    assert len(said) == 1
    assert "skipping corrupt checkpoint at step 20: " in said[0]
    (checkpoints.checkpoint_path(tmp_path, 10) / "state.json").write_text("{")
    with pytest.raises(
        CheckpointError, match="has no usable checkpoint; skipping corrupt checkpoint at step 20"
    ):
        checkpoints.find(tmp_path, None)


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_state_must_be_an_object(tmp_path: Path, text: str) -> None:
    directory = write_checkpoint(tmp_path, 1)
    (directory / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"state\.json: "):
        checkpoints.read_state(directory)


EVEN = {10: None, 40: None, 20: None, 30: None}
LOSSES = {10: 3.0, 20: 1.5, 30: 2.0, 40: 2.5, 50: float("nan")}


@pytest.mark.parametrize(
    ("saved", "corrupt", "step", "section", "left"),
    [
        (EVEN, (), 40, keep(1), [40]),
        (EVEN, (), 40, keep(2), [30, 40]),
        (EVEN, (), 40, keep(9), [10, 20, 30, 40]),
        # A run that went on from step 8, past a corrupt step 12, and saved step 10.
        ({8: None, 10: None, 12: None}, (12,), 10, keep(1), [10]),
        (EVEN, (20, 30), 40, keep(2, keep_every_steps=20), [10, 20, 40]),
        (LOSSES, (), 50, keep(1, keep_every_steps=40, keep_best=1), [20, 40, 50]),
    ],
)
def test_retained_checkpoints(
    saved: dict[int, float | None],
    corrupt: tuple[int, ...],
    step: int,
    section: CheckpointSection,
    left: list[int],
    tmp_path: Path,
) -> None:
    for number, loss in saved.items():
        directory = write_checkpoint(tmp_path, number, held_out_loss=loss)
        if number in corrupt:
            (directory / "state.json").unlink()
    retain(tmp_path, step, section)
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {f"step-{number:08d}" for number in left}


def test_retain_removes_what_unfinished_saves_left(tmp_path: Path) -> None:
    kept = write_checkpoint(tmp_path, 10)
    write_checkpoint(tmp_path, 20, finished=False)
    (tmp_path / "checkpoints" / "notes.txt").write_text("not ours")
    retain(tmp_path, 10, keep(1))
    assert checkpoints.find_corruption(kept, "all") is None
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {
        "notes.txt",
        "step-00000010",
    }


def test_commit_replaces_a_corrupt_checkpoint_of_the_step(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, 10)
    (directory / "state.json").unlink()
    assert write_checkpoint(tmp_path, 10) == directory
    assert checkpoints.find_corruption(directory, "all") is None
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]


def test_commit_refuses_files_that_are_not_what_was_written(tmp_path: Path) -> None:
    partial = write_checkpoint(tmp_path, 10, finished=False)
    (partial / "tensors" / FILE).write_bytes(PAYLOAD)
    with pytest.raises(CheckpointError, match=r"rank-00000\.\w+: 10240 bytes on .* 99 bytes"):
        checkpoints.commit(partial, {FILE: (99, "0" * 16)}, SaveIdentity())
    with pytest.raises(CheckpointError, match=r"rank-00001\.\w+: missing on the main .* share"):
        checkpoints.commit(partial, {"rank-00001.safetensors": (99, "0" * 16)}, SaveIdentity())
    assert checkpoints.list_steps(tmp_path) == []


def test_removal_renames_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_checkpoint(tmp_path, 10)
    rmtree = shutil.rmtree

    def killed(path: Path, **_: object) -> None:
        if path.exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.remove(directory)
    assert checkpoints.list_steps(tmp_path) == []
    [left] = directory.parent.iterdir()
    assert (left / "tensors" / FILE).exists()
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
    best = BestSection(metric="tasks/arc_easy/acc", mode="max")
    figures = {10: 0.2, 20: 0.7, 30: 0.5, 40: None}
    assert reasons_to_keep(figures, keep(1, keep_best=2), best=best) == {
        20: ["tasks/arc_easy/acc 0.7000"],
        30: ["tasks/arc_easy/acc 0.5000"],
        40: ["newest"],
    }


def test_retain_keeps_what_a_run_may_go_back_to(tmp_path: Path) -> None:
    for step, streak in ((10, 0), (20, 0), (30, 3), (40, 13)):
        partial = write_checkpoint(tmp_path, step, finished=False)
        write_state(partial, step, guard={"streak": streak})
        commit(partial, step)
    retain(tmp_path, 40, keep(1))
    assert checkpoints.list_steps(tmp_path) == [20, 40]
    reasons = reasons_to_keep({20: None, 40: None}, keep(1), 20)
    assert reasons == {40: ["newest"], 20: ["newest before bad steps"]}


def test_steps_of_more_digits_are_in_order(tmp_path: Path) -> None:
    for step in (5, 123_456_789, 99_999_999):
        write_checkpoint(tmp_path, step)
    (tmp_path / "checkpoints" / "step-7").mkdir()
    (tmp_path / "checkpoints" / "step-00000007.partial-0123abcd").mkdir()
    assert checkpoints.list_steps(tmp_path) == [5, 99_999_999, 123_456_789]


ODD: dict[str, Callable[[Path], object]] = {
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nowhere": lambda path: path.symlink_to("/no/such/place"),
    "a file": lambda path: path.write_text("x"),
    "a pipe": os.mkfifo,
}


@pytest.mark.parametrize("make", ODD.values(), ids=ODD.keys())
def test_what_is_no_directory_is_not_passed_over_in_silence(
    make: Callable[[Path], object], tmp_path: Path
) -> None:
    """It is named, an older checkpoint is used, and a save at that step replaces it."""
    write_checkpoint(tmp_path, 1)
    odd = checkpoints.checkpoint_path(tmp_path, 2)
    make(odd)
    said: list[str] = []
    assert newest(tmp_path, said.append) == checkpoints.checkpoint_path(tmp_path, 1)
    (message,) = said
    assert message.startswith(f"skipping corrupt checkpoint at step 2: {odd}: is a")
    assert checkpoints.find_corruption(odd, "all") in message
    assert newest_step_after_save(tmp_path) == 2
    assert [
        path.name for path in odd.parent.iterdir() if path.name.startswith("step-00000002")
    ] == [odd.name]


def newest_step_after_save(run: Path) -> int:
    write_checkpoint(run, 2)
    checkpoint = newest(run, pytest.fail)
    assert checkpoint is not None
    return checkpoints.read_manifest(checkpoint).identity.step


@pytest.mark.parametrize("name", [checkpoints.MANIFEST, checkpoints.STATE, f"tensors/{FILE}"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_named_and_not_waited_for(
    make: Callable[[Path], object], name: str, tmp_path: Path
) -> None:
    path = write_checkpoint(tmp_path, 1) / name
    path.unlink()
    make(path)
    assert "not a regular file" in shown(
        checkpoints.find_corruption(path.parent if "/" not in name else path.parent.parent)
    )
    (tmp_path / checkpoints.RUN_ID).unlink(missing_ok=True)
    make(tmp_path / checkpoints.RUN_ID)
    assert checkpoints.read_run_id(tmp_path) is None
