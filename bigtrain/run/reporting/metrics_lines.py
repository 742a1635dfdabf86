"""Lines of metrics.jsonl: reading them, and dropping the last ones when a run resumes, without
reading the entire file: except for events, steps and samples only grow from line to line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Literal

from bigtrain.errors import DataError
from bigtrain.system.files import whole_file

_BLOCK_BYTES = 1 << 16


def cut_lines(path: Path, last_step: int, samples: int) -> tuple[float | None, int]:
    """Keep the lines of `path` up to `last_step` and events that begin before sample `samples`;
    nothing if `last_step` is 0. Returns the loss of the first step in the file, and how many
    complete lines were dropped. Parses the dropped lines and the line before, and copies earlier
    lines. A kill here loses nothing."""
    if not path.exists():
        return None, 0
    with path.open("rb") as file:
        kept_lines: list[bytes] = []  # after `end`, in reverse order
        num_dropped, end = 0, 0
        for begin, text in _backwards(file):
            line = _parsed(text)
            if line is None:
                continue  # truncated by a kill
            step, is_event = line.get("step"), "event" in line
            if not isinstance(step, int) or last_step == 0:
                num_dropped += 1
                continue
            if not (line["first_sample"] < samples if is_event else step <= last_step):
                num_dropped += 1
                continue
            is_read = not is_event and line.get("samples", samples + 1) <= samples
            if is_read and text.endswith(b"\n"):
                end = begin + len(text)
                break
            kept_lines.append(text)
        # A new file, although most lines are kept: a launch that this one has fenced off may still
        # have the old one open, and its appended lines are discarded with it.
        with whole_file(path, path.with_name(f".{path.name}.tmp")) as new_file:
            file.seek(0)
            num_bytes = end
            while num_bytes > 0 and (block := file.read(min(_BLOCK_BYTES, num_bytes))):
                new_file.write(block)
                num_bytes -= len(block)
            new_file.writelines(line.rstrip(b"\n") + b"\n" for line in reversed(kept_lines))
    with path.open("rb") as file:
        for text in file:
            line = _parsed(text)
            if line and "loss" in line and "event" not in line:
                return line["loss"], num_dropped
    return None, num_dropped


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield every line, in order; an incomplete last one is skipped, since a run may be writing
    it. Raises DataError if the file cannot be read, or contains anything but JSON objects."""
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                line = _parsed(text)
                if line:
                    yield line
                elif text.endswith(b"\n"):
                    raise DataError(f"{path} is corrupt: line {number:,} is not a JSON object")
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read: {error.strerror or error} -> name the directory of a run"
        ) from error


def kind_of(line: dict[str, Any]) -> Literal["step", "evaluation", "event", "outer_step"]:
    """Return the kind of a line."""
    if "event" in line:
        return "event"
    if "outer_step" in line:
        return "outer_step"
    return "step" if "loss" in line else "evaluation"


def last_lines(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the last logged step and the last evaluation, empty if there is none; read from the
    end."""
    last_by_kind: dict[str, dict[str, Any]] = {}
    with suppress(FileNotFoundError), path.open("rb") as file:
        for _, text in _backwards(file):
            line = _parsed(text)
            if line:
                last_by_kind.setdefault(kind_of(line), line)
            if {"step", "evaluation"} <= last_by_kind.keys():
                break
    return last_by_kind.get("step", {}), last_by_kind.get("evaluation", {})


def _backwards(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield the position and content of each line including its newline, the last line first."""
    begin = file.seek(0, os.SEEK_END)
    unread = b""
    while begin > 0:
        size = min(_BLOCK_BYTES, begin)
        begin = file.seek(begin - size)
        unread = file.read(size) + unread
        while (cut := unread.rfind(b"\n", 0, -1)) >= 0:
            yield begin + cut + 1, unread[cut + 1 :]
            unread = unread[: cut + 1]
    if unread:
        yield 0, unread


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else {}
