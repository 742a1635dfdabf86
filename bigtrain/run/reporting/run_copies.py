"""Copies of checkpoints and of the export at an address: `output.copy_to`.

A thread of the main rank copies while the run continues. Only the newest checkpoint waits: if
copying takes longer than the time between saves, some are skipped, and training never waits. A
failed copy is logged. At the end the run waits ``output.copy_wait_seconds`` for copies in progress.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bigtrain.errors import DataError
from bigtrain.system.storage.copies import copy_tree
from bigtrain.system.storage.remote_file import store_of
from bigtrain.system.storage.stores import joined, with_retries

_RUN_FILES = ("config.json", "deepspeed.json", "environment.json", "run_id")
_RUN_FOLDERS = ("model_config", "tokenizer")
_LAST_FILE = "manifest.json"
"""File of a checkpoint that is written last: it marks a complete one."""


@dataclass
class RunCopies:
    """Copies of the run in `directory` to `address`. Only the main rank has one. Not collective."""

    directory: Path
    address: str
    _turn: threading.Condition = field(default_factory=threading.Condition)
    _waiting: Path | None = None
    _busy: bool = False
    _notes: list[str] = field(default_factory=list)
    _thread: threading.Thread | None = None

    def add(self, path: Path) -> None:
        """Copy the committed checkpoint or export `path` as soon as the previous copy is done."""
        with self._turn:
            if self._waiting is not None:  # replaced by `path`
                self._notes.append(
                    f"{self._waiting.name} was not copied to {self.address}: copying takes longer "
                    "than the time between saves"
                )
            self._waiting = path
            if self._thread is None:
                # A daemon: the end of the process does not wait for a server.
                self._thread = threading.Thread(target=self._work, daemon=True)
                self._thread.start()
            self._turn.notify_all()

    def notes(self) -> list[str]:
        """Return log lines on the copies since the last call."""
        with self._turn:
            notes, self._notes = self._notes, []
            return notes

    def wait(self, seconds: float) -> list[str]:
        """Wait until all is copied, at most `seconds`; return lines to log."""
        with self._turn:
            is_finished = self._turn.wait_for(
                lambda: self._waiting is None and not self._busy, seconds
            )
        notes = self.notes()
        if not is_finished:
            notes.append(
                f"not everything was copied to {self.address} within {seconds:g} s; the "
                "same command continues the copy"
            )
        return notes

    def _work(self) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._waiting is not None)
                path, self._waiting, self._busy = self._waiting, None, True
            assert path is not None
            note = self._copy(path)
            with self._turn:
                self._busy = False
                if note:
                    self._notes.append(note)
                self._turn.notify_all()

    def _copy(self, path: Path) -> str:
        """Copy `path` and return a log line. Never raises: a failed copy does not end the run."""
        start = time.monotonic()
        item = path.relative_to(self.directory).as_posix()
        target = joined(self.address, item)
        last_file = _LAST_FILE if (path / _LAST_FILE).exists() else None
        try:
            num_bytes = copy_tree(path, target, last_file)
            if num_bytes:
                # Small files that a resume needs, and the metrics so far.
                store = store_of(self.address)
                for name in (*_RUN_FILES, "metrics.jsonl", "log.txt"):
                    file, address = self.directory / name, joined(self.address, name)
                    if file.is_file():
                        # Read the content first: the file may grow while it is sent.
                        write = partial(store.put, address, file.read_bytes())
                        with_retries(address, "cannot be written", write)
                for name in _RUN_FOLDERS:
                    if (self.directory / name).is_dir():
                        copy_tree(self.directory / name, joined(self.address, name))
        except FileNotFoundError:
            return f"{item} was not copied to {self.address}: it was deleted in the meantime"
        except (DataError, OSError) as error:
            return f"{item} could not be copied: {error}; the run continues without it"
        except Exception as error:  # any error of a library
            return f"{item} could not be copied to {self.address}: {type(error).__name__}: {error}"
        if not num_bytes:  # everything was copied before
            return ""
        return f"{item} copied to {target} ({num_bytes:,} bytes, {time.monotonic() - start:.1f} s)"
