"""Checkpoints as directories: what makes one exist, which is the newest, which go.

::

    RUN/checkpoints/step-00000200/
        tensors/        fp32 masters, optimizer states, buffers (bigtrain.engine.checkpoint_io)
        state.json      step, samples, tokens, configuration, versions
        probe.safetensors   a fixed input and the logits the model gave for it
        manifest.json   every file above with size and xxh3 checksum

A checkpoint exists once its manifest has been renamed into place; a directory without one is
garbage that the next save removes. Nothing here is collective: the main process calls it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bigtrain.data.directories import sync_to_disk
from bigtrain.data.shards import file_checksum
from bigtrain.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"
PROBE = "probe.safetensors"
TENSORS = "tensors"
_NAME = re.compile(r"step-(\d{8,})")


def checkpoint_path(run_directory: Path, step: int) -> Path:
    """Where the checkpoint after `step` optimizer steps is kept."""
    return run_directory / "checkpoints" / f"step-{step:08d}"


def prepare(directory: Path) -> None:
    """An empty directory for a new checkpoint; whatever unfinished save left there is removed."""
    remove(directory)
    (directory / TENSORS).mkdir(parents=True)


def commit(directory: Path) -> None:
    """Make the checkpoint exist: list every file with size and checksum, then rename the list."""
    files = {}
    for path in _files(directory):
        sync_to_disk(path)
        files[path.relative_to(directory).as_posix()] = {
            "bytes": path.stat().st_size,
            "xxh3": file_checksum(path),
        }
    temporary = directory / f"{MANIFEST}.tmp"
    temporary.write_text(json.dumps({"format": FORMAT, "files": files}, indent=1))
    sync_to_disk(temporary)
    sync_to_disk(directory / TENSORS)
    temporary.rename(directory / MANIFEST)
    sync_to_disk(directory)
    sync_to_disk(directory.parent)


def damage(directory: Path, *, checksums: bool = False) -> str | None:
    """Why the checkpoint cannot be used, or None. Sizes are always compared."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            return f"{directory / MANIFEST}: format {manifest['format']}, this is format {FORMAT}"
        for name, expected in manifest["files"].items():
            path = directory / name
            if not path.is_file():
                return f"{path}: missing"
            if path.stat().st_size != expected["bytes"]:
                return f"{path}: {path.stat().st_size} bytes, should be {expected['bytes']}"
            if checksums and file_checksum(path) != expected["xxh3"]:
                return f"{path}: contents do not match their checksum"
    except FileNotFoundError:
        return f"{directory / MANIFEST}: missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{directory / MANIFEST}: unreadable ({error})"
    return None


def steps(run_directory: Path) -> list[int]:
    """Steps that have a committed checkpoint, oldest first; damage is not looked for."""
    found = []
    for path in (run_directory / "checkpoints").glob("step-*"):
        match = _NAME.fullmatch(path.name)
        if match and (path / MANIFEST).is_file():
            found.append(int(match[1]))
    return sorted(found)


def newest_valid(
    run_directory: Path, warn: Callable[[str], None], *, checksums: bool = False
) -> Path | None:
    """The newest checkpoint that is whole; damaged newer ones are named to `warn`."""
    for step in reversed(steps(run_directory)):
        directory = checkpoint_path(run_directory, step)
        reason = damage(directory, checksums=checksums)
        if reason is None:
            return directory
        warn(f"checkpoint of step {step} is damaged and passed over: {reason}")
    return None


def find(run_directory: Path, step: int | None) -> Path:
    """The checkpoint of `step`, or the newest valid one; every byte of it is read and compared.

    Raises CheckpointError without one.
    """
    available = steps(run_directory)
    if step is not None:
        directory = checkpoint_path(run_directory, step)
        if step not in available:
            known = ", ".join(map(str, available)) or "none"
            raise CheckpointError(f"{run_directory}: no checkpoint of step {step}; steps: {known}")
        reason = damage(directory, checksums=True)
        if reason is not None:
            raise CheckpointError(f"checkpoint of step {step} is damaged: {reason}")
        return directory
    reasons: list[str] = []
    newest = newest_valid(run_directory, reasons.append, checksums=True)
    if newest is None:
        raise CheckpointError(
            f"{run_directory}: holds no usable checkpoint" + "".join(f"; {r}" for r in reasons)
        )
    return newest


def read_state(directory: Path) -> dict[str, Any]:
    """`state.json` of a committed checkpoint."""
    try:
        state = json.loads((directory / STATE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory / STATE}: unreadable ({error})") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{directory / STATE}: not a JSON object")
    return state


def retain(run_directory: Path, saved_step: int, keep_last: int) -> None:
    """Keep the checkpoint of `saved_step` and those before it, `keep_last` in all; remove the rest.

    The rest are older ones, what unfinished saves left, and later ones: those were damaged and
    passed over when the run went on, or it would stand there.
    """
    until_now = [step for step in steps(run_directory) if step <= saved_step]
    kept = {checkpoint_path(run_directory, step) for step in until_now[-keep_last:]}
    for path in (run_directory / "checkpoints").glob("step-*"):
        if path not in kept:
            remove(path)


def remove(directory: Path) -> None:
    """Remove a checkpoint; a kill in between leaves garbage, never a part that looks whole."""
    (directory / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def _files(directory: Path) -> list[Path]:
    return sorted(p for p in directory.rglob("*") if p.is_file() and p.name != MANIFEST)
