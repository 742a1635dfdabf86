"""Shards of the slow tests, each of at most ten minutes, so that every `.ci/run` runs a part.

Which shard a run takes follows from its commit, so that successive commits take different ones.
`tests/slow_times.json` holds the seconds of one test of each function on a machine of two cores, as
`make slow-times` measured them where it is quiet; those of a busy one are too many.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TIMES_FILE = Path(__file__).resolve().parents[1] / "slow_times.json"
SHARD_SECONDS = 540.0
"""Ten minutes, less what starting and collecting take."""
UNKNOWN_SECONDS = 20.0
"""Assumed for a test of a function that was never timed."""


@dataclass(frozen=True)
class Shard:
    """One part of the slow tests. seconds: its tests took them when they were last timed;
    untimed: its functions that were never timed."""

    index: int
    num_shards: int
    tests: frozenset[str]
    seconds: float
    untimed: tuple[str, ...]

    def __str__(self) -> str:
        text = f"slow shard {self.index + 1} of {self.num_shards}: {len(self.tests)} tests"
        text += f", {self.seconds:.0f} s when last timed"
        return text + (f"; never timed: {', '.join(self.untimed)}" if self.untimed else "")


def function_of(test: str) -> str:
    """Return `file::function` of a test's id, which may end in `[parameters]`."""
    return test.partition("[")[0]


def read_times() -> dict[str, float]:
    """Return the seconds of one test, by function."""
    times: dict[str, float] = json.loads(TIMES_FILE.read_text(encoding="utf-8"))
    return times


def write_times(seconds: Mapping[str, float], known: Mapping[str, float]) -> None:
    """Write the mean of the tests of each function beside those of functions that did not run.

    seconds: by test id.
    """
    by_function: dict[str, list[float]] = {}
    for test, duration in seconds.items():
        by_function.setdefault(function_of(test), []).append(duration)
    means = {name: round(sum(all_) / len(all_), 1) for name, all_ in by_function.items()}
    text = json.dumps({**known, **means}, indent=0, sort_keys=True)
    TIMES_FILE.write_text(text + "\n", encoding="utf-8")


def cut(tests: Sequence[str], times: Mapping[str, float]) -> list[Shard]:
    """Cut the tests, in the order of their collection, into shards of about equal time.

    Neighbours stay together as far as that goes, for tests of a module share what it made. A test
    that takes longer than a shard has one of its own.
    """
    seconds = [times.get(function_of(test), UNKNOWN_SECONDS) for test in tests]
    limit = sum(seconds) / max(1, math.ceil(sum(seconds) / SHARD_SECONDS))
    parts: list[list[int]] = [[]]
    filled = 0.0
    for index, duration in enumerate(seconds):
        if parts[-1] and filled + duration / 2 > limit:
            parts.append([])
            filled = 0.0
        parts[-1].append(index)
        filled += duration
    return [
        Shard(
            number,
            len(parts),
            frozenset(tests[i] for i in part),
            sum(seconds[i] for i in part),
            tuple(_untimed((tests[i] for i in part), times)),
        )
        for number, part in enumerate(parts)
    ]


def _untimed(tests: Iterable[str], times: Mapping[str, float]) -> list[str]:
    return sorted({function_of(test) for test in tests} - times.keys())


def choose(shards: Sequence[Shard], choice: str) -> Shard:
    """Return the shard that `choice` names: its number from 1, or a commit's full hash.

    Raises ValueError for a number that does not exist.
    """
    if len(choice) == 40:
        return shards[int(choice, 16) % len(shards)]
    number = int(choice)
    if not 1 <= number <= len(shards):
        raise ValueError(f"--slow-shard {choice}: the slow tests have shards 1 to {len(shards)}")
    return shards[number - 1]
