"""Runs of a report: metrics, and the other files of a run directory (settings, versions, launches,
hangs). Every file is read defensively: a missing or corrupt one becomes a sentence in `notes`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bigtrain.errors import DataError, one_line
from bigtrain.report.metrics_file import MetricsFile
from bigtrain.report.reduction import MAX_BUCKETS

_MAX_FILES = 1000
_SAMPLE_BYTES = 1 << 18
_HANG = re.compile(r"step-(\d{1,15})-.+")
_GENERATION = re.compile(r"(\d{8,15})(?:\.superseded)?\.json")


@dataclass(frozen=True)
class Start:
    """Launch of the run.

    generation: number of the launch, from 1. since: UTC. step, samples, world_size: at the start;
    None if the run did not record them (bigtrain did not always write `starts.jsonl`).
    """

    generation: int
    since: str
    host: str
    slurm_job_id: str | None = None
    step: int | None = None
    samples: int | None = None
    world_size: int | None = None


@dataclass(frozen=True)
class Hang:
    """Hang that the watchdog ended. step: from 1; 0 before the first. text: the watchdog's report,
    which names the lagging ranks; empty without a report."""

    step: int
    time: str
    text: str


@dataclass(frozen=True)
class Prediction:
    """Contents of `prediction.json`; None or empty if a value is missing.

    terms: seconds of a step by name; memory_terms: GiB by name.
    """

    step_seconds: float | None = None
    tokens_per_second: float | None = None
    peak_memory_gib: float | None = None
    terms: Mapping[str, float] = field(default_factory=dict)
    memory_terms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """Completion of a prompt at an evaluation."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True)
class RunFiles:
    """Contents of a run directory's files other than metrics.jsonl; None for an unreadable file.

    notes: sentences about files that could not be read.
    """

    config: dict[str, Any] | None
    deepspeed: dict[str, Any] | None
    environment: dict[str, Any] | None
    prediction: Prediction | None
    starts: list[Start]
    hangs: list[Hang]
    notes: list[str]
    samples: list[Sample] = field(default_factory=list)


def read_run_files(directory: Path) -> RunFiles:
    """Return the contents of all files. Never raises."""
    notes: list[str] = []
    prediction = _read_object(directory / "prediction.json", notes, needed=False)
    return RunFiles(
        config=_read_object(directory / "config.json", notes),
        deepspeed=_read_object(directory / "deepspeed.json", notes),
        environment=_read_object(directory / "environment.json", notes),
        prediction=None
        if prediction is None
        else Prediction(
            finite(prediction.get("step_seconds")),
            finite(prediction.get("tokens_per_second")),
            finite(prediction.get("peak_memory_gib")),
            finite_entries(prediction.get("terms")),
            finite_entries(prediction.get("memory_terms")),
        ),
        starts=_read_starts(directory, notes),
        hangs=_read_hangs(directory / "hangs"),
        notes=notes,
        samples=_read_samples(directory / "samples.jsonl"),
    )


def _read_object(path: Path, notes: list[str], needed: bool = True) -> dict[str, Any] | None:
    """Return the object in a JSON file; None, and a sentence in `notes`, if it cannot be read. A
    missing file is noted only if it is `needed`."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        if needed:
            notes.append(f"{path.name} is missing.")
        return None
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read: {one_line(error, None)}.")
        return None
    if not isinstance(value, dict):
        notes.append(f"{path.name} is not a JSON object.")
        return None
    return value


def finite(value: Any) -> float | None:
    """Return `value` if it is a finite number of at least 0, else None."""
    if type(value) not in (int, float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


def finite_entries(value: Any) -> dict[str, float]:
    """Return the entries of an object with a finite number of at least 0; empty for a value that
    is not an object."""
    if not isinstance(value, dict):
        return {}
    numbers = {str(name): finite(entry) for name, entry in value.items()}
    return {name: number for name, number in numbers.items() if number is not None}


def _read_starts(directory: Path, notes: list[str]) -> list[Start]:
    """Return the launches by generation. Files in `generations` (fencing tokens) have time and host
    of each launch; `starts.jsonl` has step, samples and world size."""
    launches: dict[int, dict[str, Any]] = {}
    for path in _entries(directory / "generations"):
        if match := _GENERATION.fullmatch(path.name):
            launches[int(match[1])] = _read_object(path, notes) or {}
    try:
        texts = (directory / "starts.jsonl").read_bytes().splitlines()
    except OSError:
        texts = []
    for line in _objects_in(texts):
        generation = line.get("generation")
        if type(generation) is int:
            launches[generation] = {**launches.get(generation, {}), **line}
    return [_start(generation, launches[generation]) for generation in sorted(launches)]


def _start(generation: int, values: dict[str, Any]) -> Start:
    """Return a launch from its recorded values, which may be missing or wrong."""

    def integer(name: str) -> int | None:
        value = values.get(name)
        return value if type(value) is int and 0 <= value < 2**53 else None

    job = values.get("slurm_job_id")
    return Start(
        generation=generation,
        since=str(values.get("since") or "unknown"),
        host=str(values.get("host") or "unknown"),
        slurm_job_id=None if job is None else str(job),
        step=integer("step"),
        samples=integer("samples"),
        world_size=integer("world_size"),
    )


def _objects_in(texts: list[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in the lines of a file; skip other lines, as a truncated last line."""
    for text in texts:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict):
            yield line


def _read_samples(path: Path) -> list[Sample]:
    """Return the samples at the end of the file, by step; of a repeated step, the later sample."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _SAMPLE_BYTES))
            texts = file.read().splitlines()
            if size > _SAMPLE_BYTES:
                texts = texts[1:]  # the first line is incomplete
    except OSError:
        return []
    newest: dict[tuple[int, str], Sample] = {}
    for line in _objects_in(texts):
        step, prompt, text = (line.get(name) for name in ("step", "prompt", "text"))
        if type(step) is int and isinstance(prompt, str) and isinstance(text, str):
            newest[step, prompt] = Sample(step, prompt, text)
    return sorted(newest.values(), key=lambda sample: sample.step)


def _read_hangs(directory: Path) -> list[Hang]:
    """Return the hangs in a run's `hangs` directory, by step and time."""
    hangs = []
    for path in _entries(directory):
        report = path / "report.txt"
        if (match := _HANG.fullmatch(path.name)) is None:
            continue
        try:
            # Stacks may exist without a report if no rank could write one.
            text = report.read_text(errors="replace")[:4000] if report.exists() else ""
            modified_at = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        except OSError:
            continue
        hangs.append(Hang(int(match[1]), modified_at.strftime("%Y-%m-%d %H:%M:%S UTC"), text))
    return sorted(hangs, key=lambda hang: (hang.step, hang.time))


def _entries(directory: Path) -> list[Path]:
    """Return the first files in a directory, sorted; empty if it cannot be read."""
    try:
        return sorted(directory.iterdir())[:_MAX_FILES]
    except OSError:
        return []


_MIN_BUCKETS = 1 << 12


@dataclass
class Run:
    """Run on the page. name: short and unique on the page. files: as read by the last `read`."""

    name: str
    directory: Path
    metrics: MetricsFile
    files: RunFiles

    def read(self, final: bool = False) -> bool:
        """Read new lines and files; return whether anything changed. `final`: see
        `MetricsFile.read`."""
        changed = self.metrics.read(final)
        files = read_run_files(self.directory)
        changed |= files != self.files
        self.files = files
        return changed

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps that the run is configured for."""
        train = (self.files.config or {}).get("train")
        steps = train.get("steps") if isinstance(train, dict) else None
        return steps if type(steps) is int and steps > 0 else None


def open_runs(directories: Sequence[Path], final: bool = True) -> list[Run]:
    """Return the runs in these directories, read to the end; `final`: see `MetricsFile.read`.

    Raises DataError if one is not a run directory, has no metrics, or is named twice.
    """
    directory_by_path: dict[Path, Path] = {}
    for directory in directories:
        if not directory.is_dir():
            problem = "is not a directory" if directory.exists() else "no such directory"
            raise DataError(f"{directory}: {problem} -> name a run's output.directory")
        if not (directory / "metrics.jsonl").is_file():
            raise DataError(
                f"{directory}: has no metrics.jsonl, so it is not a run, or has not started "
                "training -> name a run's output.directory"
            )
        path = directory.resolve()
        if path in directory_by_path:
            first_name = directory_by_path[path]
            also = "" if first_name == directory else f", which is {first_name}"
            raise DataError(f"{directory}{also}: the same run is named twice -> remove one of them")
        directory_by_path[path] = directory
    # All runs share the charts, so together they have at most twice the points of a single run.
    max_buckets = MAX_BUCKETS
    while max_buckets > _MIN_BUCKETS and max_buckets * len(directories) > 2 * MAX_BUCKETS:
        max_buckets //= 2
    files = [read_run_files(directory) for directory in directories]
    paths = list(directory_by_path)
    if len(paths) > 1:
        names = _unique_suffixes(paths)
    else:
        # The directory as the user set it, for example ``runs/quickstart/run``; if it was moved or
        # copied since, or has no settings, the last part of its path.
        names = [paths[0].name]
        output = (files[0].config or {}).get("output")
        configured = output.get("directory") if isinstance(output, dict) else None
        if isinstance(configured, str) and Path(configured).name == paths[0].name:
            names = [configured.rstrip("/")]
    runs = [
        Run(name, directory, MetricsFile(directory / "metrics.jsonl", max_buckets), run_files)
        for name, directory, run_files in zip(names, directories, files, strict=True)
    ]
    for run in runs:
        run.metrics.read(final)
    return runs


def _unique_suffixes(paths: Sequence[Path]) -> list[str]:
    """Return the shortest unique suffixes of the paths."""
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]
