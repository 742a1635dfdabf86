"""Check of ``output.directory``: an own, writable directory, since a run writes names that other
directories have too (``config.json``, ``tokenizer/``) and reads what it finds. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from bigtrain.errors import Problem
from bigtrain.system.files import RUN_ID, RUN_TEXTS, why_not_creatable

KEY = "output.directory"

_RUN_NAMES = (
    *("generations", "checkpoints", "metrics.jsonl", "hangs", "requeue", "requeued"),
    "base_model.json",
)
"""Names that a launch, or the batch system that starts it, writes first: one marks a run."""

_REPOSITORIES = (".git", ".hg", ".svn", ".jj")
_NOTE_ENDINGS = (".log", ".out", ".err", ".yaml", ".yml", ".sh", ".sbatch")
"""Endings of files that a user puts next to a run before it starts: no text to train on."""
_TEXT_ENDINGS = tuple(
    f"{suffix}{compression}"
    for suffix in (".txt", ".md", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow")
    for compression in ("", ".gz", ".zst", ".xz", ".bz2")
)
_REUSED_NAMES = ("checkpoints", "generations", "hangs", "log.txt", "metrics.jsonl", "starts.jsonl")
"""Directories in which a run makes files, and files that it appends to; others are replaced."""

_NUM_SHOWN = 3


def check_output(directory: Path, *, is_here: bool = True) -> Sequence[Problem]:
    """Refuse a directory of something else than a run, and one that cannot be written to; leave
    nothing behind. is_here: whether the run starts on this host; elsewhere others may be
    writable."""
    parent = directory.parent if directory.is_file() else directory
    rule, remedy = _why_refused(directory), f"a directory of its own, such as {parent / 'run'}"
    if rule is None and is_here:
        rule, remedy = why_not_creatable(directory), "choose another one"
        # What an earlier launch made must be writable, too; else only the first save would fail.
        reused = [] if rule else [directory / name for name in _REUSED_NAMES]
        unwritable = [path for path in reused if path.exists() and not os.access(path, os.W_OK)]
        if unwritable:
            rule = f"this user cannot write to {unwritable[0]}"
            remedy = "change its owner or permissions, or choose another one"
    return [] if rule is None else [Problem(KEY, str(directory), rule, remedy)]


def _why_refused(directory: Path) -> str | None:
    """Return the reason why `directory` cannot be the directory of a run, or None if it can."""
    resolved = directory.resolve()
    if resolved == Path(resolved.anchor):
        return "is the root of the file system"
    with suppress(RuntimeError):  # no HOME, and no such user
        if resolved == Path.home().resolve():
            return "is a home directory"
    if not directory.is_dir():
        return "is a file" if directory.exists() else None
    with os.scandir(directory) as entries:
        is_file_by_name = {entry.name: entry.is_file() for entry in entries}
    repository = next((name for name in _REPOSITORIES if name in is_file_by_name), None)
    if repository is not None:
        return f"is a repository (it has a {repository})"
    if any(name in is_file_by_name for name in _RUN_NAMES):
        if RUN_ID in is_file_by_name:
            return None
        # Without a run's id, another program may have made these names: refuse a corpus of texts.
        texts = {n for n in is_file_by_name if n.lower().endswith(_TEXT_ENDINGS)} - {*RUN_TEXTS}
        return _refuse_files(sorted(texts))
    foreign_names = sorted(
        name
        for name, is_file in is_file_by_name.items()
        if not name.startswith(".") and not (is_file and name.endswith(_NOTE_ENDINGS))
    )
    return _refuse_files(foreign_names)


def _refuse_files(names: Sequence[str]) -> str | None:
    """Return the rule that files with `names` break; None without names."""
    if not names:
        return None
    further_text = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
    return (
        f"holds files of something else than a run: {', '.join(names[:_NUM_SHOWN])}{further_text}"
    )
