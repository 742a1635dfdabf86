"""Checkpoints as directories: what makes one exist, what is wrong with it, which is the newest.

::

    RUN/checkpoints/step-00000200/
        tensors/        fp32 masters, optimizer states, buffers (bigtrain.engine.checkpoint_io)
        state.json      step, samples, tokens, held-out loss, configuration, versions, topology
        probe.safetensors   a fixed input and the logits the model gave for it
        manifest.json   every file above with size and xxh3 checksum

A save writes ``step-00000200.partial-ATTEMPT``, where each start of the run is another attempt: so
a process of an earlier start that is still alive on a host nobody reaches writes beside it, never
into it. The checkpoint exists once that directory, manifest included, has been renamed. Deleting
begins with a rename too. What has any other name that begins with ``step-`` is garbage, which the
next start or save removes. Nothing here is collective: the main process calls it. Imports no torch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from bigtrain.data.directories import sync_to_disk
from bigtrain.data.shards import file_checksum
from bigtrain.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"
PROBE = "probe.safetensors"
TENSORS = "tensors"
TENSOR_SUFFIX = ".distcp"
_REQUIRED = {STATE, f"{TENSORS}/.metadata"}
_NAME = re.compile(r"step-(\d{8,})")

Contents = Literal["none", "small", "all"]
"""Which files are read whole and compared with their checksums, beside the sizes of all of them:
`small` is all but tensor files, whose parts are checked again as a resume reads them."""


def checkpoint_path(run_directory: Path, step: int) -> Path:
    """Where the checkpoint after `step` optimizer steps is kept."""
    return run_directory / "checkpoints" / f"step-{step:08d}"


def partial_path(run_directory: Path, step: int, attempt: str) -> Path:
    """Where it is while it is being written; `attempt` names this start of the run."""
    final = checkpoint_path(run_directory, step)
    return final.with_name(f"{final.name}.partial-{attempt}")


def prepare(partial: Path) -> None:
    """An empty directory for a new checkpoint at a `partial_path`."""
    shutil.rmtree(partial, ignore_errors=True)
    (partial / TENSORS).mkdir(parents=True)


def commit(
    partial: Path,
    checksums: Mapping[str, tuple[int, str]] | None = None,
    permit: Callable[[], None] = lambda: None,
) -> Path:
    """Make the checkpoint exist: list every file, then rename the directory; returns its path.

    `checksums`: bytes and XXH3-64 by file name below ``tensors/``, as counted while they were
    written; other files are read. `permit` is called last before anything but `partial` changes,
    and may raise. Raises CheckpointError where a size on disk is another one.
    """
    known = {f"{TENSORS}/{name}": entry for name, entry in (checksums or {}).items()}
    files = {}
    for name in sorted(known.keys() | set(_files(partial))):
        path = partial / name
        num_bytes = path.stat().st_size if path.is_file() else None
        if name in known:
            expected, checksum = known[name]
            if num_bytes != expected:
                raise CheckpointError(
                    f"{path}: {'missing' if num_bytes is None else f'{num_bytes} bytes'} on the "
                    f"main process's host, {expected} bytes were written -> output.directory must "
                    "be on a file system that all hosts share"
                )
        else:
            sync_to_disk(path)
            checksum = file_checksum(path)
        files[name] = {"bytes": num_bytes, "xxh3": checksum}
    temporary = partial / f"{MANIFEST}.tmp"
    temporary.write_text(json.dumps({"format": FORMAT, "files": files}, indent=1))
    sync_to_disk(temporary)
    sync_to_disk(partial / TENSORS)
    temporary.rename(partial / MANIFEST)
    sync_to_disk(partial)
    final = partial.with_name(partial.name.split(".", 1)[0])
    permit()
    if final.exists():
        remove(final)  # damaged and passed over: the run would stand there otherwise
    partial.rename(final)
    sync_to_disk(final.parent)
    return final


def damage(directory: Path, contents: Contents = "small") -> str | None:
    """Why the checkpoint cannot be used, naming the file; or None."""
    manifest = directory / MANIFEST
    try:
        document = json.loads(manifest.read_text())
        if document["format"] != FORMAT:
            return f"{manifest}: format {document['format']}, this is format {FORMAT}"
        unlisted = sorted(_REQUIRED - document["files"].keys())
        if unlisted:
            return f"{manifest}: does not list {unlisted[0]}"
        for name, expected in document["files"].items():
            path = directory / name
            if not path.is_file():
                return f"{path}: missing"
            if path.stat().st_size != expected["bytes"]:
                return f"{path}: {path.stat().st_size} bytes, should be {expected['bytes']}"
            is_read = contents == "all" or (
                contents == "small" and not name.endswith(TENSOR_SUFFIX)
            )
            if is_read and file_checksum(path) != expected["xxh3"]:
                return f"{path}: contents do not match their checksum"
    except FileNotFoundError:
        return f"{manifest}: missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{manifest}: unreadable ({error})"
    return None


def steps(run_directory: Path) -> list[int]:
    """Steps that have a checkpoint, oldest first; damage is not looked for."""
    found = []
    for path in (run_directory / "checkpoints").glob("step-*"):
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            found.append(int(match[1]))
    return sorted(found)


def usable(
    run_directory: Path, warn: Callable[[str], None], contents: Contents = "small"
) -> Iterator[Path]:
    """Checkpoints that are whole, newest first; each damaged one is named to `warn` on the way."""
    for step in reversed(steps(run_directory)):
        directory = checkpoint_path(run_directory, step)
        reason = damage(directory, contents)
        if reason is None:
            yield directory
        else:
            warn(passed_over(step, reason))


def passed_over(step: int, reason: str) -> str:
    """What is said about a damaged checkpoint that an older one stands in for."""
    return f"checkpoint of step {step} is damaged and passed over: {reason}"


def find(run_directory: Path, step: int | None, contents: Contents = "all") -> Path:
    """The checkpoint of `step`, or the newest whole one.

    Raises CheckpointError without one.
    """
    available = steps(run_directory)
    if step is not None:
        directory = checkpoint_path(run_directory, step)
        if step not in available:
            known = ", ".join(map(str, available)) or "none"
            raise CheckpointError(f"{run_directory}: no checkpoint of step {step}; steps: {known}")
        reason = damage(directory, contents)
        if reason is not None:
            raise CheckpointError(f"checkpoint of step {step} is damaged: {reason}")
        return directory
    reasons: list[str] = []
    newest = next(usable(run_directory, reasons.append, contents), None)
    if newest is None:
        raise CheckpointError(
            f"{run_directory}: holds no usable checkpoint" + "".join(f"; {r}" for r in reasons)
        )
    return newest


def read_state(directory: Path) -> dict[str, Any]:
    """`state.json` of a checkpoint."""
    try:
        state = json.loads((directory / STATE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory / STATE}: unreadable ({error})") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{directory / STATE}: not a JSON object")
    return state


def remove(directory: Path) -> None:
    """Remove a checkpoint; a kill in between leaves garbage, never a part that looks whole."""
    doomed = directory.with_name(f"{directory.name}.removed-{os.getpid()}")
    shutil.rmtree(doomed, ignore_errors=True)
    directory.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def clear_garbage(run_directory: Path) -> None:
    """Remove what interrupted saves and deletions left. No save may be under way."""
    for path in (run_directory / "checkpoints").glob("step-*"):
        if not _NAME.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def _files(directory: Path) -> Iterator[str]:
    for path in directory.rglob("*"):
        if path.is_file() and path.name not in (MANIFEST, f"{MANIFEST}.tmp"):
            yield path.relative_to(directory).as_posix()
