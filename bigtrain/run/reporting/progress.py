"""Console output of a run: a progress bar or plain lines, and always log.txt."""

from __future__ import annotations

import math
import re
import shutil
import sys
from datetime import datetime
from pathlib import Path
from typing import NoReturn, TextIO

from tqdm import tqdm

from bigtrain.errors import OutputError
from bigtrain.system.files import cannot_be_written

OUTPUT_REMEDY = (
    "make room, or choose another output.directory; when restarted, the run resumes from its "
    "newest checkpoint"
)


class Progress:
    """Text of a run on standard error and, with the time of each line, in ``log.txt``, which is
    copied to a new file first: a stale launch that still runs has the old file open. `terminal`: as
    in `MetricsWriter`. failure: error of writing, for which `StopAgreement` ends the run."""

    def __init__(
        self, log_path: Path, *, total_steps: int, first_step: int = 0, terminal: bool | None = None
    ) -> None:
        self._stream: TextIO = sys.stderr
        if log_path.exists():
            temporary = log_path.with_name(f".{log_path.name}.tmp")
            shutil.copyfile(log_path, temporary)
            temporary.replace(log_path)
        self.failure: OutputError | None = None
        self._path = log_path
        self._log = log_path.open("a", encoding="utf-8", buffering=1)
        self._bar: tqdm[NoReturn] | None = None
        shows_bar = self._stream.isatty() if terminal is None else terminal
        if shows_bar:
            self._bar = tqdm(
                total=total_steps,
                initial=first_step,
                unit="step",
                file=self._stream,
                dynamic_ncols=True,
                # The step of one log line may take minutes: no estimate from tqdm's own clock.
                bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt}{postfix}",
            )

    def step(self, step: int, line: str, metrics: str) -> None:
        """Show progress at `step`: `metrics` next to the bar, or else the full `line`."""
        self._write(line)
        if self._bar is None:
            print(line, file=self._stream, flush=True)
        else:
            self.advance(step, metrics)
            self._bar.refresh()

    @property
    def is_live(self) -> bool:
        """True if there is a bar, which `advance` moves."""
        return self._bar is not None

    def advance(self, step: int, metrics: str) -> None:
        """Move the bar to `step`, with `metrics` next to it; drawn at most ten times a second."""
        if self._bar is not None:
            self._bar.set_postfix_str(metrics, refresh=False)
            self._bar.update(step - self._bar.n)

    def note(self, text: str) -> None:
        """Write a line or lines to log.txt only; nothing after `close`."""
        if not self._log.closed:
            self._write(text)

    def say(self, text: str) -> None:
        """Show any other line or lines; after `close` they are not in log.txt."""
        self.note(text)
        if self._bar is None:
            print(text, file=self._stream, flush=True)
        else:
            self._bar.write(text, file=self._stream)

    def close(self) -> None:
        """Leave the bar as it is and close log.txt. May be called again."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self.failure = close_written(self._log, self._path, self.failure)

    def _write(self, text: str) -> None:
        if self.failure is None:
            now = datetime.now().astimezone().isoformat(timespec="seconds")
            lines = "\n".join(f"{now} {line}" for line in text.splitlines())
            self.failure = write_line(self._log, self._path, lines)


def write_line(file: TextIO, path: Path, text: str) -> OutputError | None:
    """Write a line to an open file; return the error if that fails, or None."""
    try:
        file.write(text + "\n")
    except OSError as error:
        return OutputError(cannot_be_written(path, error, OUTPUT_REMEDY))
    return None


def close_written(
    file: TextIO, path: Path, failure: OutputError | None = None
) -> OutputError | None:
    """Close a file; return `failure`, or else the error of flushing the buffer."""
    try:
        file.close()
    except OSError as error:
        return failure or OutputError(cannot_be_written(path, error, OUTPUT_REMEDY))
    return failure


def format_duration(seconds: float) -> str:
    """Format `seconds` human-readably: 42s, 4m10s, 3h07m, 2d05h."""
    if not math.isfinite(seconds):
        return "?"
    total = max(0, round(seconds))
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    if total < 86400:
        return f"{total // 3600}h{total % 3600 // 60:02d}m"
    return f"{total // 86400}d{total % 86400 // 3600:02d}h"


def format_lr(lr: float) -> str:
    """Format a learning rate without the zeros of Python's exponents: 1.0e-3, 0."""
    return re.sub(r"e([-+])0*(\d)", r"e\1\2", f"{lr:.2e}") if lr else "0"


def format_rate(per_second: float) -> str:
    """Format a rate with thousands separators: 5,300; below ten with two decimals."""
    return f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.2f}"
