"""Watchdog that ends a hung run and reports the rank it waits for.

A thread of every rank checks whether the training thread makes marks (`heartbeat`), and reports the
rank's position (`status_store`). When no rank has made progress for ``watchdog.timeout_seconds``
(``slow_timeout_seconds`` while any rank is in an activity that may take long), one
raises the alarm: all dump their stacks to ``RUN/hangs/step-.../`` and answer with their
positions, one writes the report, and all end with exit code 76, so that the launcher restarts the
run.

If a hang inside C code holds the interpreter, or the process is stopped, other ranks report that
this rank does not respond; and a timer in C (``faulthandler``), which every check resets, ends the
process (exit code 1). If the status store is lost, each rank reports for itself.
"""

from __future__ import annotations

import faulthandler
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from bigtrain.errors import EXIT_HANG
from bigtrain.models.torch_patches import flight_recorder_trace
from bigtrain.run.health.heartbeat import Heartbeat, Transfers, current_collective
from bigtrain.run.health.status_store import (
    Diagnosis,
    Position,
    StatusStore,
    diagnose,
    diagnose_alone,
    open_status_store,
)
from bigtrain.settings.sections.running import WatchdogSection
from bigtrain.system.stop_signals import ask_for_restart
from bigtrain.system.world import World

DIRECTORY = "hangs"
# Timeouts for every rank to answer an alarm, and for the report; the ranks end in any case.
_ANSWER_SECONDS = 4.0
_REPORT_SECONDS = 3.0
_LAST_SECONDS = 30.0
_MOST_REQUEUES_PER_STEP = 3
_SECONDS_BETWEEN_CONNECTIONS = 60.0
_MISSED_CHECKS = 4
"""Checks after which a rank in a slow activity counts as gone, if it has not reported: it reports
at every check."""


class Watchdog:
    """Watchdog of this rank's training thread, together with all other ranks. `is_stale`: whether a
    later launch holds the run directory, whose log and restart marker are then not written."""

    def __init__(
        self,
        section: WatchdogSection,
        world: World,
        run_directory: Path,
        heartbeat: Heartbeat,
        *,
        is_stale: Callable[[], bool],
        hosts: Sequence[str],
    ) -> None:
        """Start watching. Collective over all ranks."""
        self._section = section
        self._world = world
        self._run_directory = run_directory
        self._heartbeat = heartbeat
        self._is_stale = is_stale
        self._host = socket.gethostname()
        self._hosts = list(hosts)
        self._status_store: StatusStore | None = None
        self._limit = section.timeout_seconds
        self._stop = threading.Event()
        self._moved_at = self._slow_seen_at = time.monotonic()
        self._transfers = Transfers()
        self._connects_at = 0.0
        self._thread: threading.Thread | None = None
        if self._limit is None:
            return
        if world.size > 1:
            self._status_store = open_status_store(world)
        self._check_seconds = min(5.0, max(0.1, self._limit / 10))
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            faulthandler.cancel_dump_traceback_later()
        if self._status_store is not None:
            self._status_store.close()

    def _watch(self) -> None:
        """Check the training thread until `__exit__`, in the thread of the watchdog."""
        assert self._limit is not None
        # Marks, and the store's counters, at the last check; -1: unknown.
        count, moves, slow_reports = -1, -1, -1
        self._moved_at = rank_moved_at = time.monotonic()  # of any rank, and of this rank
        while True:
            check_began = time.monotonic()
            if self._stop.wait(self._check_seconds):
                return
            now = time.monotonic()
            overslept = now - check_began - self._check_seconds
            if overslept > 2 * self._check_seconds:
                # The process was stopped, and its training thread as well.
                self._moved_at += overslept
                rank_moved_at += overslept
            moved = self._heartbeat.count != count
            moved |= self._heartbeat.slow and self._transfers.made_progress()
            count = self._heartbeat.count
            if moved:
                self._moved_at = rank_moved_at = now
            limit = self._current_limit(now)
            # Reset the C timer, which ends this process if no further check resets it.
            idle_seconds = time.monotonic() - self._moved_at
            timer_seconds = max(limit - idle_seconds, 0) + 2 * self._check_seconds
            timer_seconds += _ANSWER_SECONDS + _REPORT_SECONDS
            faulthandler.dump_traceback_later(timer_seconds, exit=True, file=2)
            if self._status_store is not None and self._status_store.is_lost:
                self._connect_again(self._status_store)
            if self._status_store is not None:
                # Other ranks may wait for this rank, unless it waits in a collective itself.
                is_slow = self._heartbeat.slow and now - rank_moved_at <= self._slow_limit
                is_slow = is_slow and current_collective() is None
                self._status_store.report(self._position(), moved, is_slow)
                if self._status_store.alarm() is not None:
                    self._end()
                if now - self._moved_at > self._limit / 2:
                    # Any rank's progress counts: one rank may export while all others wait.
                    counter = self._status_store.moves()
                    if counter is not None and moves not in (-1, counter):
                        self._moved_at = now
                    moves = -1 if counter is None else counter
                    # While any rank is in a slow activity, the longer limit holds for all.
                    counter = self._status_store.slow_reports()
                    if counter is not None and slow_reports not in (-1, counter):
                        self._slow_seen_at = now
                    slow_reports = -1 if counter is None else counter
                    limit = self._current_limit(now)
                else:
                    moves = slow_reports = -1
            if now - self._moved_at > limit:
                self._end()

    def _connect_again(self, lost_store: StatusStore) -> None:
        """Connect again, at most once a minute: a single late answer must not disconnect a rank
        permanently."""

        def connect() -> None:
            status_store = lost_store.reopened()
            if status_store is not None:
                self._status_store = status_store

        now = time.monotonic()
        if now >= self._connects_at:
            self._connects_at = now + _SECONDS_BETWEEN_CONNECTIONS
            threading.Thread(target=connect, name="watchdog-connect", daemon=True).start()

    @property
    def _slow_limit(self) -> float:
        assert self._limit is not None
        return max(self._limit, self._section.slow_timeout_seconds)

    def _current_limit(self, now: float) -> float:
        """Return the seconds without progress after which this rank raises the alarm: the longer
        limit while this rank, or a rank for which it may wait, is in a slow activity."""
        assert self._limit is not None
        other_is_slow = now - self._slow_seen_at <= _MISSED_CHECKS * self._check_seconds
        return self._slow_limit if self._heartbeat.slow or other_is_slow else self._limit

    def _position(self, collective: str | None = None) -> Position:
        beat = self._heartbeat
        return Position(
            rank=self._world.rank,
            host=self._host,
            pid=os.getpid(),
            step=beat.step,
            activity=beat.activity,
            module=beat.module,
            collective=collective,
        )

    def _end(self) -> None:
        """Report the hang, and end this rank."""
        faulthandler.dump_traceback_later(_LAST_SECONDS, exit=True, file=2)
        position = self._position(current_collective())
        name = f"step-{position.step:08d}-{secrets.token_hex(3)}"
        if self._status_store is not None:
            name = self._status_store.raise_alarm(name) or name
            self._status_store.answer(position)
        directory = self._run_directory / DIRECTORY / name
        # In a thread, since file systems may hang, too: then the process ends without the dump.
        dump = threading.Thread(target=self._dump, args=(directory,), daemon=True)
        dump.start()
        # One rank reports for all; without the status store each rank reports for itself.
        store = self._status_store
        diagnosis: Diagnosis | None = None
        if store is None or store.leads(self._world.is_main, _ANSWER_SECONDS, _REPORT_SECONDS):
            answers = None if store is None else store.answers(_ANSWER_SECONDS)
            if store is None or answers is None:
                diagnosis = diagnose_alone(position, self._hosts)
            else:
                diagnosis = diagnose(answers, store.last_known(), self._hosts)
        dump.join(_REPORT_SECONDS)
        if diagnosis is not None:
            write = threading.Thread(target=self._write, args=(directory, diagnosis), daemon=True)
            write.start()
            write.join(_REPORT_SECONDS)
            if self._status_store is not None:
                self._status_store.finish()
        sys.stderr.flush()
        os._exit(EXIT_HANG)

    def _dump(self, directory: Path) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with (directory / f"rank-{self._world.rank:05d}.txt").open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
            trace = flight_recorder_trace()
            if trace is not None:
                # Torch's reader of flight records requires names that end in the rank.
                (directory / f"flight-recorder-{self._world.rank:05d}").write_bytes(trace)
        except (OSError, RuntimeError) as error:
            print(f"watchdog: {directory} cannot be written: {error}", file=sys.stderr)
            faulthandler.dump_traceback(2, all_threads=True)

    def _write(self, directory: Path, diagnosis: Diagnosis) -> None:
        idle = time.monotonic() - self._moved_at
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        text = (
            f"watchdog: no progress for {idle:.0f} s ({now}), this run ends with exit code "
            f"{EXIT_HANG}; stacks of all ranks: {directory}\n{diagnosis.text}\n"
        )
        print(text, end="", file=sys.stderr, flush=True)
        try:
            (directory / "report.txt").write_text(text)
            if self._is_stale():
                return
            with (self._run_directory / "log.txt").open("a") as file:
                file.write(text)
            # Ask the launcher to restart the run, unless the same step hangs repeatedly.
            step = self._heartbeat.step
            hangs_of_step = list(directory.parent.glob(f"step-{step:08d}-*"))
            if len(hangs_of_step) <= _MOST_REQUEUES_PER_STEP:
                ask_for_restart(self._run_directory, "watchdog", step)
        except OSError as error:
            print(f"watchdog: the report cannot be written: {error}", file=sys.stderr)
