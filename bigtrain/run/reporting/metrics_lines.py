"""Lines of metrics.jsonl: reading them, and dropping the last lines when a run resumes. Lines are
read backwards from the end, since steps and samples grow from line to line, except for events."""

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
        # Backwards to the last line of a kept step: every line before it is kept, too.
        kept_lines: list[bytes] = []  # after `unread_end`, the last line first
        num_dropped, unread_end = 0, 0
        for begin, text in _backwards(file):
            line = _parsed(text)
            if line is None:
                continue  # truncated by a kill
            step, is_event = line.get("step"), "event" in line
            if last_step == 0 or not isinstance(step, int):
                is_kept = False
            elif is_event:
                is_kept = line["first_sample"] < samples
            else:
                is_kept = step <= last_step
            if not is_kept:
                num_dropped += 1
                continue
            is_kept_step = not is_event and line.get("samples", samples + 1) <= samples
            if is_kept_step and text.endswith(b"\n"):
                unread_end = begin + len(text)
                break
            kept_lines.append(text)
        # A new file, although most lines are kept: a launch that this one has fenced off may still
        # have the old file open, and the lines that it appends are discarded with this file.
        with whole_file(path, path.with_name(f".{path.name}.tmp")) as new_file:
            file.seek(0)
            remaining_bytes = unread_end
            while remaining_bytes > 0 and (block := file.read(min(_BLOCK_BYTES, remaining_bytes))):
                new_file.write(block)
                remaining_bytes -= len(block)
            new_file.writelines(line.rstrip(b"\n") + b"\n" for line in reversed(kept_lines))
    # The loss of the first step.
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
    text = b""  # read from `begin`, and not yielded yet
    while begin > 0:
        block_bytes = min(_BLOCK_BYTES, begin)
        begin = file.seek(begin - block_bytes)
        text = file.read(block_bytes) + text
        while (newline := text.rfind(b"\n", 0, -1)) >= 0:
            yield begin + newline + 1, text[newline + 1 :]
            text = text[: newline + 1]
    if text:
        yield 0, text


def _parsed(text: bytes) -> dict[str, Any] | None:
    """Return a line; None if it is not JSON, as a truncated line, and empty if it is no object."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else {}
