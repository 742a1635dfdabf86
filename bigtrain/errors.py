"""The errors a user can cause, each with one clear text and an exit code, as a rule 2.

::

    BigtrainError
    ├── ConfigError      the run YAML, an override, a DeepSpeed JSON, or their combination
    ├── DataError        inputs, shards, manifests, tokenizers
    ├── ModelError       model names, configurations, weights, exports
    ├── CheckpointError  checkpoints that are missing, corrupt or do not belong to this run
    │   └── CorruptCheckpointError   found while reading it; an older one may do
    ├── OutputError      files that cannot be written
    ├── TrainingError    loss or gradients that nothing helps against
    ├── LaunchError      this machine or launcher cannot run what was asked for
    └── LostRunTokenError    this start does not hold the run directory any more
        ├── RunRemovedError   it is gone
        └── StaleLaunchError   a later start of the run holds it (exit code 77)

``assert`` is kept for states that only a bug in bigtrain can reach.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

EXIT_USER_ERROR = 2
"""Something to fix; one text says what."""
EXIT_STOPPED = 75
"""Stopped by a signal, saved, and not at its end: EX_TEMPFAIL of sysexits.h, try again later."""
EXIT_HANG = 76
"""Nothing moved, so the watchdog ended the run, which goes on from its newest checkpoint."""
EXIT_STALE_LAUNCH = 77
"""A later start of the run holds its directory. Must not be started again."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: the key, the value found there, the rule it breaks, the remedy."""

    key: str
    value: object
    rule: str
    remedy: str = ""

    def __str__(self) -> str:
        shown = "" if self.value is None else f" = {_shorten(self.value)}"
        remedy = f" -> {self.remedy}" if self.remedy else ""
        return f"{self.key}{shown}: {self.rule}{remedy}"


class BigtrainError(Exception):
    """Base of every error a user can cause. Entry points print it and exit with `exit_code`."""

    exit_code = EXIT_USER_ERROR


class ConfigError(BigtrainError):
    """Everything wrong with a configuration, reported at once.

    Parameters: `problems`, at least one; `source`, what was being read (a file's path, say).
    """

    def __init__(self, problems: Iterable[Problem] | Problem, source: str = "") -> None:
        self.problems: Sequence[Problem] = (
            (problems,) if isinstance(problems, Problem) else tuple(problems)
        )
        self.source = source
        count = len(self.problems)
        head = f"{count} problem{'s' if count != 1 else ''}" + (f" in {source}" if source else "")
        super().__init__("\n".join([head, *(f"  {problem}" for problem in self.problems)]))

    def __reduce__(self) -> tuple[object, ...]:
        """By its parameters: other ranks get errors by pickle."""
        return type(self), (self.problems, self.source)


class DataError(BigtrainError):
    """Inputs, shards, manifests or tokenizers that cannot be used."""


class ModelError(BigtrainError):
    """A model that cannot be found, built, loaded, or exported faithfully."""


class CheckpointError(BigtrainError):
    """A checkpoint that is missing, corrupt, or belongs to another run."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint whose files are not as they were written."""


class OutputError(BigtrainError):
    """A place that cannot be written: no room, no permission."""


class TrainingError(BigtrainError):
    """A run whose loss or gradients go wrong whatever is tried."""


class LaunchError(BigtrainError):
    """This machine or launcher cannot run what was asked for."""


class LostRunTokenError(BigtrainError):
    """This start of the run does not hold its directory any more, and has stopped writing."""


class RunRemovedError(LostRunTokenError):
    """The run's directory was removed while it ran."""


class StaleLaunchError(LostRunTokenError):
    """A later start of the run holds its directory."""

    exit_code = EXIT_STALE_LAUNCH


def _shorten(value: object, limit: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def first_line(error: BaseException) -> str:
    """What a foreign library says in one line."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
