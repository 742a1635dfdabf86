"""The errors a user can cause, each with one clear text and an exit code, usually 2.

::

    BigtrainError
    ├── ConfigError      the run YAML, an override, a DeepSpeed JSON, or their combination
    ├── DataError        inputs, shards, manifests, tokenizers
    │   └── TooFewAnswersError       of a split, which has nothing to compare them with
    ├── ModelError       model names, configurations, weights, exports
    ├── CheckpointError  checkpoints that are missing, corrupt or do not belong to this run
    │   └── CorruptCheckpointError   found while reading it; an older one may be complete
    ├── OutputError      files that cannot be written
    ├── ExtensionError   code of yours that the run calls: callbacks, objectives, metrics
    ├── TrainingError    loss or gradients stay bad after every rollback
    │   └── FaultyHostError   this host computes wrong bits (exit code 78)
    ├── LaunchError      this machine or launcher cannot run what was asked for
    └── LostRunTokenError    this launch no longer holds the token of the run directory
        ├── RunRemovedError   the directory is gone
        └── StaleLaunchError   a newer launch of the run holds it (exit code 77)

``assert`` is kept for states that only a bug in bigtrain can reach.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

EXIT_USER_ERROR = 2
"""The user has something to fix; one text says what."""
EXIT_STOPPED = 75
"""Stopped by a signal and saved before the last step: EX_TEMPFAIL of sysexits.h, try again."""
EXIT_HANG = 76
"""No rank made progress, so the watchdog ended the run; it resumes from its newest checkpoint."""
EXIT_STALE_LAUNCH = 77
"""A newer launch of the run holds its directory. The stale one must not be started again."""
EXIT_FAULTY_HOST = 78
"""Bits on this host differ again from those of other hosts; the run must continue without it."""


_USER = re.compile(r"(?<=://)[^/\s'\"?#]*@")
_SECRET_NAME = (
    r"[^=&?#\s'\"]*(?:sig|token|secret|passw|credential|apikey|api_key|access_?key|auth)[^=&?#\s]*"
    r"|x-(?:amz|goog|ms)-[^=&?#\s]*|expires|key|policy|se|sp|sv|sr|st|spr|ske|sks|skt|skv|skoid|sktid"
)
_SECRET = re.compile(rf"(?:{_SECRET_NAME})=.*", re.IGNORECASE)
_PARAMETERS = re.compile(r"\?((?:[^=&?#\s'\"]+=[^&#\s'\"]*&?)+)")


def without_secrets(text: str) -> str:
    """Return `text` with credentials removed from every address in it.

    User, password and the parameters that sign a request are removed: a newly signed URL still
    means the same file.
    """
    text = _USER.sub("", text)
    return _PARAMETERS.sub(_public_parameters, text)


def _public_parameters(parameters: re.Match[str]) -> str:
    """Return a URL's parameters, with the question mark, without secrets; empty if none remains."""
    pairs = [pair for pair in parameters[1].split("&") if pair and not _SECRET.fullmatch(pair)]
    return "?" + "&".join(pairs) if pairs else ""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: the key, its value, the rule that the value breaks, the remedy."""

    key: str
    value: object
    rule: str
    remedy: str = ""

    def __str__(self) -> str:
        value_text = ""
        if self.value is not None:
            value = without_secrets(repr(self.value))
            value_text = f" = {value if len(value) <= 120 else value[:117] + '...'}"
        remedy = f" -> {self.remedy}" if self.remedy else ""
        return without_secrets(f"{self.key}{value_text}: {self.rule}{remedy}")


class BigtrainError(Exception):
    """Base of every error a user can cause. Entry points print it and exit with `exit_code`. No
    address in its text has a password or a signature."""

    exit_code = EXIT_USER_ERROR

    def __str__(self) -> str:
        return without_secrets(super().__str__())


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
        """Pickle the parameters, not the text: ranks send each other errors by pickle."""
        return type(self), (self.problems, self.source)


class DataError(BigtrainError):
    """Inputs, shards, manifests or tokenizers that cannot be used."""


class TooFewAnswersError(DataError):
    """Fewer than two rated answers: none has an answer of another prompt to compare with."""


class ModelError(BigtrainError):
    """A model that cannot be found, built, loaded, or exported faithfully."""


class CheckpointError(BigtrainError):
    """A checkpoint that is missing, corrupt, or belongs to another run."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint whose files are not as they were written."""


class OutputError(BigtrainError):
    """A place that cannot be written: no room, no permission."""


class TrainingError(BigtrainError):
    """A run whose loss or gradients stay bad after every rollback."""


class FaultyHostError(TrainingError):
    """A host whose memory or processors change bits."""

    exit_code = EXIT_FAULTY_HOST


class ExtensionError(BigtrainError):
    """Code of the user that failed when the run called it; the text has its file and line."""


class LaunchError(BigtrainError):
    """This machine or launcher cannot run what was asked for."""


class LostRunTokenError(BigtrainError):
    """This launch no longer holds the token of its run directory, and has stopped writing."""


class RunRemovedError(LostRunTokenError):
    """The run's directory was removed while it ran."""


class StaleLaunchError(LostRunTokenError):
    """This launch is stale: a newer launch of the run holds its directory."""

    exit_code = EXIT_STALE_LAUNCH


def first_line(error: BaseException) -> str:
    """Return the first line of an error of another library, or the name of its class."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def one_line(error: BaseException, limit: int | None = 300) -> str:
    """Return the text of `error` in one line of at most `limit` characters; its type if it has
    none."""
    return " ".join(str(error).split())[:limit] or type(error).__name__
