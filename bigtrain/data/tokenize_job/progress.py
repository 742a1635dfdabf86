"""Progress of `bigtrain tokenize`: bars on a terminal, else a line once a minute."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TextIO

from tqdm import tqdm

from bigtrain.data.tokenize_job.unit_builder import Counts

LINE_EVERY_S = 60.0
MAX_INPUT_BARS = 8


def announce(step: str, stream: TextIO | None = None) -> None:
    """Print on a terminal which step begins, before there is a bar: imports take seconds."""
    stream = stream or sys.stderr
    if stream.isatty():
        print(f"tokenize: {step}", file=stream, flush=True)


@dataclass
class TokenizeProgress:
    """Progress of one command's workers: over all inputs, and in the input each worker reads.
    `total_bytes`: size of the inputs (0: unknown), `done_bytes`: finished before the start."""

    total_bytes: int
    done_bytes: int
    num_workers: int
    stream: TextIO = field(default_factory=lambda: sys.stderr)
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._finished = Counts()  # of rounds that ended
        self._current: dict[int, Counts] = {}  # of this round, by worker
        self._began_at = self._line_at = self.clock()
        self._bars: list[Any] = []
        if self.stream.isatty():
            total = self.total_bytes or None
            self._bars = [self._bar("tokenize", total, self.done_bytes, 0)]
            for position in range(1, min(self.num_workers, MAX_INPUT_BARS) + 1):
                self._bars.append(self._bar("", None, 0, position))

    def update(self, worker: int, counts: Counts) -> None:
        """Show the counts of a worker, whose number is from 0."""
        self._current[worker] = replace(counts)
        if self._bars:
            # The first bar has all inputs, and each worker's bar the input that it reads.
            total = self.counts()
            tokens_per_s = total.num_tokens / max(1e-9, self.clock() - self._began_at)
            bad = f", {total.bad_documents:,} bad" if total.bad_documents else ""
            self._bars[0].set_postfix_str(f"{tokens_per_s / 1e6:.2f}M tokens/s{bad}", refresh=False)
            self._bars[0].update(self.done_bytes + total.num_bytes - self._bars[0].n)
            if worker + 1 < len(self._bars):
                bar = self._bars[worker + 1]
                if bar.desc != f"  {_name(counts)}: ":
                    bar.reset(total=counts.part_bytes or None)
                    bar.set_description(f"  {_name(counts)}", refresh=False)
                bar.update(counts.part_done - bar.n)
        elif self.clock() - self._line_at >= LINE_EVERY_S:
            self._line_at = self.clock()
            print(self.line(), file=self.stream, flush=True)

    def end_round(self) -> None:
        """Record that the workers have ended; new ones count from zero."""
        self._finished = self.counts()
        self._current = {}

    def show_step(self, text: str) -> None:
        """Show on a terminal what is done before the first document is read."""
        if self._bars:
            self._bars[0].set_postfix_str(text)

    def wait_for_others(self, num_units: int) -> None:
        if self._bars:
            self._bars[0].set_postfix_str(f"waiting for {num_units} parts of other processes")
        elif self.clock() - self._line_at >= LINE_EVERY_S:
            self._line_at = self.clock()
            print(f"tokenize: waiting for {num_units} parts of other processes", file=self.stream)

    def counts(self) -> Counts:
        all_counts = [self._finished, *self._current.values()]
        return Counts(
            num_bytes=sum(counts.num_bytes for counts in all_counts),
            num_tokens=sum(counts.num_tokens for counts in all_counts),
            bad_documents=sum(counts.bad_documents for counts in all_counts),
        )

    def line(self) -> str:
        """Return the progress as a line of a log."""
        counts = self.counts()
        elapsed_s = max(1e-9, self.clock() - self._began_at)
        done_bytes = self.done_bytes + counts.num_bytes
        text = f"tokenize: {done_bytes / 1e6:,.0f} MB"
        if self.total_bytes:
            share = done_bytes / self.total_bytes
            text += f" of {self.total_bytes / 1e6:,.0f} ({100 * share:.0f} %)"
        text += (
            f", {counts.num_tokens / 1e6:,.1f}M tokens, {counts.num_bytes / 1e6 / elapsed_s:,.1f} "
            f"MB/s, {counts.num_tokens / elapsed_s:,.0f} tokens/s"
        )
        if self.total_bytes and counts.num_bytes:
            remaining_s = (self.total_bytes - done_bytes) * elapsed_s / counts.num_bytes
            text += f", {tqdm.format_interval(max(0, remaining_s))} left"
        if counts.bad_documents:
            text += f", {counts.bad_documents:,} bad documents"
        current = [worker for worker in self._current.values() if worker.path]
        reading = sorted(
            {f"{_name(w)} {100 * w.part_done // max(1, w.part_bytes)} %" for w in current}
        )
        return text + (f"; reading {', '.join(reading)}" if reading else "")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for bar in reversed(self._bars):
            bar.close()

    def _bar(self, name: str, total: int | None, initial: int, position: int) -> Any:
        return tqdm(
            desc=name,
            total=total,
            initial=initial,
            position=position,
            unit="B",
            unit_scale=True,
            file=self.stream,
            leave=position == 0,
        )


def _name(counts: Counts) -> str:
    return Path(counts.path).name
