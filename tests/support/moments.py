"""Moments of a run at which something is killed: a call of a Python or C function inside a phase.

A moment is a JSON object ``{"rank", "phase", "entry", "call"}``: in its `entry`-th entry of the
phase, from 1, that rank makes its `call`-th call there (calls go on counting in later entries).
Calls of a phase inside another one are not counted in the outer one. The events log has a JSON
object a line: for each phase that a rank left, how many calls it made; steps that are complete in
memory; and the moment that came, with the function that was called.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import os
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

PHASES = {
    "training step": (
        "bigtrain.engine.train_engine:TrainEngine.train_step",
        "bigtrain.engine.pipeline.engine:PipelineTrainEngine.train_step",
    ),
    "between steps": ("bigtrain.run.loop:Loop.run",),
    "copy": (
        "bigtrain.run.checkpointing.memory_saver:MemorySaver.save",
        "bigtrain.run.checkpointing.memory_saver:MemorySaver._write",
    ),
    "exchange": ("bigtrain.run.checkpointing.memory_saver:MemorySaver._copy_to_partner",),
    "recovery": (
        "bigtrain.run.segment_start:restore_or_start",
        "bigtrain.run.segment_start:acquire_run_directory",
    ),
    "transfer": ("bigtrain.run.checkpointing.memory_files:MemoryFiles._transfer",),
    "disk save": (
        "bigtrain.run.checkpointing.saver:Saver.save",
        "bigtrain.run.checkpointing.saver:Saver._write",
    ),
    "end": ("bigtrain.run.checkpointing.memory_saver:MemorySaver.finish",),
}
"""Functions by phase. transfer: of a file that a host lacks, in a recovery; end: the removal of
checkpoints in memory after the last one on disk."""

_CHUNK_BYTES = 2048
"""Of files that hosts send: tiny models have several chunks."""


class Moments:
    """Phases of this process, and the moment it waits for, if it is this rank's."""

    def __init__(
        self, events: Path, rank: int, moment: dict[str, Any] | None, hit: Callable[[], None]
    ) -> None:
        """`hit`: called once, at the moment, after it was written to `events`."""
        self._fd = os.open(events, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._rank, self._hit = rank, hit
        self._moment = moment if moment is not None and moment["rank"] == rank else None
        self._entries: dict[str, itertools.count[int]] = defaultdict(lambda: itertools.count(1))
        self._left = 0 if self._moment is None else int(self._moment["call"])

    def install(self) -> None:
        """Replace the functions of all phases; their modules are imported."""
        from bigtrain.run.checkpointing import host_files

        host_files.CHUNK_BYTES = _CHUNK_BYTES
        for phase, places in PHASES.items():
            for place in places:
                module, _, path = place.partition(":")
                *owners, name = path.split(".")
                owner: Any = functools.reduce(getattr, owners, importlib.import_module(module))
                setattr(owner, name, self._counted(phase, getattr(owner, name)))
        self._log_saves()

    def _log_saves(self) -> None:
        from bigtrain.run.checkpointing.memory_saver import MemorySaver

        settle = MemorySaver._count_last_save

        def logged(saver: MemorySaver, *, has_failed: bool) -> None:
            settle(saver, has_failed=has_failed)
            if not has_failed and saver._newest is not None:
                self._write(event="saved", step=saver._newest)

        forget = MemorySaver.forget

        def logged_forget(saver: MemorySaver) -> None:
            forget(saver)
            self._write(event="forgot")

        MemorySaver._count_last_save = logged  # type: ignore[method-assign]
        MemorySaver.forget = logged_forget  # type: ignore[method-assign]

    def _counted(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if phase == "transfer" and self._rank not in (args[1].source, args[1].target):
                return function(*args, **kwargs)
            entry, num_calls, outer = next(self._entries[phase]), 0, sys.getprofile()
            moment = self._moment
            waits = moment is not None and moment["phase"] == phase and entry >= moment["entry"]

            def count(frame: Any, event: str, argument: Any) -> None:
                nonlocal num_calls
                if event not in ("call", "c_call"):
                    return
                num_calls += 1
                if waits:
                    self._left -= 1
                    if not self._left:
                        self._come(phase, entry, frame, argument)

            sys.setprofile(count)
            try:
                return function(*args, **kwargs)
            finally:
                sys.setprofile(outer)
                self._write(event="left", phase=phase, calls=num_calls)

        return wrapper

    def _come(self, phase: str, entry: int, frame: Any, argument: Any) -> None:
        sys.setprofile(None)
        called = getattr(argument, "__qualname__", None)
        place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_qualname}"
        self._write(event="hit", phase=phase, entry=entry, place=place, called=called)
        self._hit()

    def _write(self, **event: Any) -> None:
        os.write(self._fd, json.dumps({"rank": self._rank, **event}).encode() + b"\n")


def wait_for_moment(rank: int, moment: dict[str, Any], server: int) -> None:
    """Count calls in phases; at the moment, stop until `server` has killed the ranks of ``kill``,
    for which it gets SIGUSR1."""

    def hit() -> None:
        if moment["kill"] == [rank]:
            os.kill(os.getpid(), signal.SIGKILL)
        os.kill(server, signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGSTOP)

    Moments(Path(moment["events"]), rank, moment if moment["kill"] else None, hit).install()


class EventsLog:
    """Reader of the events log of a campaign."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.calls: dict[tuple[int, str], int] = {}
        """Calls of a phase's longest entry, by rank."""
        self.num_left: Counter[tuple[int, str]] = Counter()
        """How often each rank has left each phase."""
        self.saved = 0
        """Newest step in memory that a rank has seen complete on all, of what `news` has read."""
        self._offset = 0

    def news(self) -> list[dict[str, Any]]:
        """Return the hits since the last call; `saved` is of the events since then, too."""
        self.saved = 0
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            lines = file.read()
        lines = lines[: lines.rfind(b"\n") + 1]
        self._offset += len(lines)
        events = [json.loads(line) for line in lines.splitlines()]
        for event in events:
            if event["event"] == "left":
                key = event["rank"], event["phase"]
                self.num_left[key] += 1
                self.calls[key] = max(self.calls.get(key, 0), event["calls"])
            elif event["event"] == "saved":
                self.saved = max(self.saved, event["step"])
            elif event["event"] == "forgot":  # the run went back to a checkpoint on disk
                self.saved = 0
        return [event for event in events if event["event"] == "hit"]


def table(hits: Counter[tuple[str, str, str]]) -> str:
    """Return the number of hits by topology and kind of kill (rows) and phase (columns)."""
    rows = sorted({(topology, kind) for topology, kind, _ in hits})
    lines = ["| topology | killed | " + " | ".join(PHASES) + " | all |"]
    lines.append("|" + "---|" * (len(PHASES) + 3))
    for row in [*rows, ("all", "")]:
        counts = [
            sum(n for key, n in hits.items() if key[2] == phase and row in (key[:2], ("all", "")))
            for phase in PHASES
        ]
        lines.append(f"| {row[0]} | {row[1]} | {' | '.join(map(str, counts))} | {sum(counts)} |")
    return "\n".join(lines)
