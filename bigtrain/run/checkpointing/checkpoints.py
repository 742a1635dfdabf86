"""Checkpoints as directories: commit, verification, and search for the newest.

::

    RUN/checkpoints/step-00000200/
        tensors/rank-00000.safetensors   fp32 masters, optimizer states, buffers; one of each rank
                        (bigtrain.engine.checkpoint.tensor_file)
        state.json      step, samples, tokens, held-out loss, configuration, versions, topology
        layout.json     ranges written by each rank (bigtrain.engine.checkpoint.layout)
        probe.safetensors   a fixed input and the model's logits for it
        manifest.json   run, step, every file above with size and xxh3 checksum, and its own
    RUN/run_id          random, created with the run; every checkpoint has it

A tensor file is listed with the checksum of the header, which has the checksums of the data: every
block that is read is thereby verified to belong to this step of this run.

A save writes ``step-00000200.partial-ATTEMPT``; every launch of the run is a separate attempt, so a
stale launch that still runs on an unreachable host writes next to it, never into it. The checkpoint
exists once that directory, manifest included, has been renamed. Deleting begins with a rename too.
Any other name that begins with ``step-`` is garbage, which the next launch or save removes.
Nothing here is collective: the main rank calls it. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import xxhash

from bigtrain.engine.checkpoint.layout import CheckpointLayout, parse_layout
from bigtrain.engine.checkpoint.tensor_file import SaveIdentity
from bigtrain.engine.checkpoint.tensor_files import Listing, verify_files
from bigtrain.errors import CheckpointError, CorruptCheckpointError
from bigtrain.system.files import (
    RUN_ID,
    create_whole,
    file_checksum,
    require_regular,
    sync_to_disk,
    write_whole,
)

FORMAT = 2
MANIFEST = "manifest.json"
STATE = "state.json"
LAYOUT = "layout.json"
PROBE = "probe.safetensors"
TENSORS = "tensors"
_STEP_NAME = re.compile(r"step-(\d{8,})")
_FILE_NAME = re.compile(rf"({TENSORS}/)?[^/.][^/]*")

Contents = Literal["none", "small", "all"]
"""Files that are compared with their checksums, in addition to the sizes of all files: `small` is
all but tensor files, whose blocks every rank compares as it reads them."""


@dataclass(frozen=True)
class CheckpointManifest:
    """Save that wrote a checkpoint, and its files by path: bytes, and checksum (of the file;
    of its header for a tensor file)."""

    identity: SaveIdentity
    files: Mapping[str, tuple[int, str]]

    @property
    def headers(self) -> dict[str, str]:
        """Checksum of each tensor file's header, by its name in ``tensors/``."""
        prefix = f"{TENSORS}/"
        return {
            name.removeprefix(prefix): checksum
            for name, (_, checksum) in self.files.items()
            if name.startswith(prefix)
        }


def checkpoint_path(run_directory: Path, step: int) -> Path:
    """Return the path of the checkpoint after `step` optimizer steps."""
    return run_directory / "checkpoints" / f"step-{step:08d}"


def partial_path(run_directory: Path, step: int, attempt: str) -> Path:
    """Return the path of a checkpoint while it is being written; `attempt` identifies this
    launch."""
    final = checkpoint_path(run_directory, step)
    return final.with_name(f"{final.name}.partial-{attempt}")


def prepare(partial: Path) -> None:
    """Create an empty directory for a new checkpoint at a `partial_path`."""
    shutil.rmtree(partial, ignore_errors=True)
    (partial / TENSORS).mkdir(parents=True)


def state_files(document: Mapping[str, Any], layout: CheckpointLayout) -> dict[str, bytes]:
    """Return the small files of a checkpoint on disk or in memory: its state and its layout."""
    return {
        LAYOUT: json.dumps(layout.to_json(), separators=(",", ":")).encode(),
        STATE: json.dumps(document, indent=1).encode(),
    }


def commit(
    partial: Path,
    written: Mapping[str, tuple[int, str]],
    identity: SaveIdentity,
    permit: Callable[[], None] = lambda: None,
) -> Path:
    """Commit the checkpoint: list every file, then rename the directory; return its path.
    `written`: bytes and checksum of the header by file name below ``tensors/``. `permit`: called
    right before anything but `partial` changes; may raise. Raises CheckpointError if a size on disk
    differs."""
    files = {f"{TENSORS}/{name}": entry for name, entry in sorted(written.items())}
    for name, (written_bytes, _) in files.items():
        path = partial / name
        num_bytes = path.stat().st_size if path.is_file() else None
        if num_bytes != written_bytes:
            raise CheckpointError(
                f"{path}: {'missing' if num_bytes is None else f'{num_bytes} bytes'} on the "
                f"main rank's host, {written_bytes} bytes were written -> output.directory must "
                "be on a file system that all hosts share"
            )
    for path in sorted(path for path in partial.iterdir() if path.is_file()):
        sync_to_disk(path)
        files[path.name] = (path.stat().st_size, file_checksum(path))
    sync_to_disk(partial / TENSORS)
    write_whole(partial / MANIFEST, manifest_text(CheckpointManifest(identity, files)).encode())
    final = partial.with_name(partial.name.split(".", 1)[0])
    permit()
    # A corrupt checkpoint: resume skipped it, since else the run would be past this step.
    if os.path.lexists(final):
        remove(final)
    partial.rename(final)
    sync_to_disk(final.parent)
    return final


def manifest_text(manifest: CheckpointManifest) -> str:
    """Return the contents of ``manifest.json``."""
    files = {
        name: {"bytes": num_bytes, _checksum_key(name): checksum}
        for name, (num_bytes, checksum) in manifest.files.items()
    }
    document = {"format": FORMAT, **asdict(manifest.identity), "files": files}
    return json.dumps({**document, "xxh3": _document_checksum(document)}, indent=1)


def _checksum_key(name: str) -> str:
    return "header_xxh3" if name.startswith(f"{TENSORS}/") else "xxh3"


def _document_checksum(document: Mapping[str, Any]) -> str:
    """Return the checksum of the manifest's canonical JSON: sorted keys, no spaces."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_64_hexdigest(text.encode())


def read_manifest(directory: Path) -> CheckpointManifest:
    """Return the manifest of the checkpoint `directory`; its step must match the directory's name.
    Raises CorruptCheckpointError."""
    path = directory / MANIFEST
    try:
        require_regular(path)
        document = json.loads(path.read_text())
        # Refuse other formats before anything of this format is read.
        if document["format"] == 1:
            raise CorruptCheckpointError(
                f"{path}: format 1, whose pickle index is no longer supported, this is "
                f"format {FORMAT} -> export it with the version of bigtrain that wrote it, and "
                "start a new run from it with checkpoint.initialize_from"
            )
        if document["format"] != FORMAT:
            raise CorruptCheckpointError(
                f"{path}: format {document['format']}, this is format {FORMAT}"
            )
        if document.pop("xxh3") != _document_checksum(document):
            raise CorruptCheckpointError(f"{path}: contents do not match their checksum")
        identity = SaveIdentity(*(document[name] for name in asdict(SaveIdentity())))
        files = {
            name: (int(entry["bytes"]), str(entry[_checksum_key(name)]))
            for name, entry in document["files"].items()
        }
        # Names are joined to the directory: "../x" must be refused.
        refused_names = [name for name in files if _FILE_NAME.fullmatch(name) is None]
        if refused_names:
            raise ValueError(f"it lists {refused_names[0]!r}")
    except FileNotFoundError as error:
        raise CorruptCheckpointError(f"{path}: missing") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path}: unreadable ({error})") from error

    # It must list a state and tensors, and be in the directory in which it was written.
    manifest = CheckpointManifest(identity, files)
    if STATE not in files or not manifest.headers:
        raise CorruptCheckpointError(
            f"{path}: does not list {f'{TENSORS}/' if STATE in files else STATE}"
        )
    name_match = _STEP_NAME.fullmatch(directory.name)
    if name_match is not None and int(name_match[1]) != identity.step:
        raise CorruptCheckpointError(f"{path}: is of step {identity.step}, unlike {directory.name}")
    return manifest


def manifest_digest(directory: Path) -> str:
    """Return the SHA-256 of a checkpoint's manifest, which two saves never have in common. Raises
    OSError."""
    return hashlib.sha256((directory / MANIFEST).read_bytes()).hexdigest()


def find_corruption(directory: Path, contents: Contents = "small") -> str | None:
    """Return why the checkpoint cannot be used, with the file; None if it can."""
    try:
        _verify(directory, contents)
    except CorruptCheckpointError as error:
        return str(error)
    except OSError as error:
        return f"{directory}: unreadable ({error})"
    return None


def _verify(directory: Path, contents: Contents) -> None:
    """Raise CorruptCheckpointError, or OSError for an unreadable file."""
    if not directory.is_dir():
        entry_type = f"a link to {os.readlink(directory)}" if directory.is_symlink() else "a file"
        raise CorruptCheckpointError(f"{directory}: is {entry_type}, not a directory")
    # Sizes, and contents of small files; the contents of tensor files are compared last.
    manifest = read_manifest(directory)
    for name, (num_bytes, checksum) in manifest.files.items():
        is_read = contents != "none" and not name.startswith(f"{TENSORS}/")
        _verify_file(directory / name, num_bytes, checksum if is_read else None)
    if contents == "none":
        return

    # state.json and the run's directory (if there is one) must name the same run and step.
    identity = manifest.identity
    state = read_state(directory)
    if (state.get("run"), state.get("step")) != (identity.run, identity.step):
        raise CorruptCheckpointError(
            f"{directory / STATE}: is of run {state.get('run')}, step {state.get('step')}, the "
            f"manifest of run {identity.run}, step {identity.step}"
        )
    run_directory = directory.parent.parent
    is_in_run = directory == checkpoint_path(run_directory, identity.step)
    run_id = read_run_id(run_directory) if is_in_run else None
    if run_id not in (None, identity.run):
        raise CorruptCheckpointError(
            f"{directory / MANIFEST}: is of run {identity.run}, but {run_directory / RUN_ID} is "
            f"{run_id}: it was copied here from another run -> remove it, or, to resume from "
            f"it, {run_directory / RUN_ID}"
        )
    if contents == "all":
        verify_files(directory / TENSORS, Listing(manifest.headers, manifest.identity))


def verify_small_files(directory: Path, manifest: CheckpointManifest) -> None:
    """Compare all files but tensor files with their checksums. Raises CorruptCheckpointError, or
    OSError for an unreadable file."""
    for name, (num_bytes, checksum) in manifest.files.items():
        if not name.startswith(f"{TENSORS}/"):
            _verify_file(directory / name, num_bytes, checksum)


def _verify_file(path: Path, num_bytes: int, checksum: str | None) -> None:
    if not path.is_file():
        problem = "not a regular file" if os.path.lexists(path) else "missing"
        raise CorruptCheckpointError(f"{path}: {problem}")
    if path.stat().st_size != num_bytes:
        raise CorruptCheckpointError(f"{path}: {path.stat().st_size} bytes, should be {num_bytes}")
    if checksum is not None and file_checksum(path) != checksum:
        raise CorruptCheckpointError(f"{path}: contents do not match their checksum")


def read_run_id(run_directory: Path) -> str | None:
    """Return the id in ``RUN/run_id``; None if it is missing or invalid."""
    try:
        require_regular(run_directory / RUN_ID)
        text = (run_directory / RUN_ID).read_bytes()[:64].decode("ascii").strip()
    except (OSError, ValueError):
        return None
    return text if re.fullmatch("[0-9a-f]{16}", text) else None


def make_run_id(run_directory: Path) -> str:
    """Return the run's id, and write it if it is missing: the id of the newest checkpoint, or a new
    id for a new run. If launches overlap, the first to write it wins."""
    run_id = read_run_id(run_directory)
    if run_id is not None:
        return run_id
    run_id = secrets.token_hex(8)
    for step in reversed(list_steps(run_directory)):
        with suppress(CorruptCheckpointError):
            run_id = read_manifest(checkpoint_path(run_directory, step)).identity.run
            break
    run_directory.mkdir(parents=True, exist_ok=True)
    path, content = run_directory / RUN_ID, f"{run_id}\n".encode()
    draft = run_directory / f".{RUN_ID}.{secrets.token_hex(4)}"
    if create_whole(path, content, draft):
        return run_id
    # The file exists: another launch has written it in the meantime, or it is corrupt.
    other_id = read_run_id(run_directory)
    if other_id is not None:
        return other_id
    write_whole(path, content, draft)
    return run_id


def list_steps(run_directory: Path) -> list[int]:
    """Return the steps that have a checkpoint, complete or corrupt, oldest first. A broken link or
    a file with the name of a checkpoint counts, lest it be skipped silently."""
    paths = (run_directory / "checkpoints").glob("step-*")
    matches = (_STEP_NAME.fullmatch(path.name) for path in paths)
    return sorted(int(match[1]) for match in matches if match)


def usable(
    run_directory: Path, warn: Callable[[str], None], contents: Contents = "small"
) -> Iterator[Path]:
    """Yield complete checkpoints, newest first; call `warn` for each corrupt one on the way."""
    for step in reversed(list_steps(run_directory)):
        directory = checkpoint_path(run_directory, step)
        reason = find_corruption(directory, contents)
        if reason is None:
            yield directory
        else:
            warn(skipped_message(step, reason))


def without_checkpoint(run_directory: Path, rule: str) -> str:
    """Return the message about a directory without a checkpoint, for example a mistyped one."""
    if not run_directory.is_dir():
        return f"{run_directory}: no such directory -> name a run's output.directory"
    return f"{run_directory}: {rule} -> name a run's output.directory, after its first save"


def skipped_message(step: int, reason: str) -> str:
    """Return the message about a corrupt checkpoint that is replaced by an older one."""
    return f"skipping corrupt checkpoint at step {step}: {reason}"


def find(
    run_directory: Path,
    step: int | None,
    contents: Contents = "all",
    warn: Callable[[str], None] = lambda text: None,
) -> Path:
    """Return the checkpoint of `step`, or the newest complete one; call `warn` for each newer one
    that is corrupt. Raises CheckpointError if there is none."""
    available = list_steps(run_directory)
    if step is not None:
        directory = checkpoint_path(run_directory, step)
        if step not in available:
            steps = ", ".join(map(str, available)) or "none"
            raise CheckpointError(f"{run_directory}: no checkpoint of step {step}; steps: {steps}")
        reason = find_corruption(directory, contents)
        if reason is not None:
            raise CheckpointError(f"checkpoint of step {step} is corrupt: {reason}")
        return directory
    reasons: list[str] = []
    newest = next(usable(run_directory, reasons.append, contents), None)
    if newest is None:
        if not reasons:
            raise CheckpointError(without_checkpoint(run_directory, "has no usable checkpoint"))
        raise CheckpointError(
            f"{run_directory}: has no usable checkpoint" + "".join(f"; {r}" for r in reasons)
        )
    for reason in reasons:
        warn(reason)
    return newest


def read_state(directory: Path) -> dict[str, Any]:
    """Read `state.json` of a checkpoint. Raises CorruptCheckpointError."""
    try:
        require_regular(directory / STATE)
        state = json.loads((directory / STATE).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{directory / STATE}: unreadable ({error})") from error
    if not isinstance(state, dict):
        raise CorruptCheckpointError(f"{directory / STATE}: not a JSON object")
    return state


def list_tensors(directory: Path) -> Listing:
    """Return the tensor files of a checkpoint, from its manifest. Raises CorruptCheckpointError."""
    manifest = read_manifest(directory)
    layout = None
    if LAYOUT in manifest.files:  # absent in older checkpoints
        path = directory / LAYOUT
        try:
            layout = parse_layout(path.read_bytes())
        except (OSError, ValueError) as error:
            raise CorruptCheckpointError(f"{path}: unreadable ({error})") from error
    return Listing(manifest.headers, manifest.identity, layout)


def remove(directory: Path) -> None:
    """Remove a checkpoint. A kill in between leaves garbage, not a partial checkpoint."""
    doomed = directory.with_name(f"{directory.name}.removed-{os.getpid()}")
    _discard(doomed)
    directory.rename(doomed)
    _discard(doomed)


def _discard(path: Path) -> None:
    """Remove a directory (or a link or file with the name) if it exists and can be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def garbage(run_directory: Path) -> list[Path]:
    """Return leftovers of interrupted saves and deletions, if no save is in progress."""
    paths = (run_directory / "checkpoints").glob("step-*")
    return [path for path in paths if not _STEP_NAME.fullmatch(path.name)]


def clear_garbage(run_directory: Path) -> None:
    """Remove leftovers of interrupted saves and deletions. No save may be in progress."""
    for path in garbage(run_directory):
        _discard(path)
