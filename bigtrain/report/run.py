"""Run of the report: its metrics, its other files, and a unique name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bigtrain.errors import DataError
from bigtrain.report.metrics_file import MetricsFile
from bigtrain.report.reduction import MAX_BUCKETS
from bigtrain.report.run_files import RunFiles, read_run_files

_FEWEST_BUCKETS = 1 << 12


@dataclass
class Run:
    """Run on the page. name: short and unique on the page. files: as last read."""

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
    seen: dict[Path, Path] = {}
    for directory in directories:
        _require_run(directory)
        place = directory.resolve()
        if place in seen:
            also = "" if seen[place] == directory else f", which is {seen[place]}"
            raise DataError(f"{directory}{also}: the same run is named twice -> remove one of them")
        seen[place] = directory
    # They share one chart: in total they have not many more points than a single run.
    most = MAX_BUCKETS
    while most > _FEWEST_BUCKETS and most * len(directories) > 2 * MAX_BUCKETS:
        most //= 2
    runs = [
        Run(
            name,
            directory,
            MetricsFile(directory / "metrics.jsonl", most),
            read_run_files(directory),
        )
        for name, directory in zip(_names(list(seen)), directories, strict=True)
    ]
    for run in runs:
        run.metrics.read(final)
    return runs


def _require_run(directory: Path) -> None:
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "no such directory"
        raise DataError(f"{directory}: {what} -> name a run's output.directory")
    if not (directory / "metrics.jsonl").is_file():
        raise DataError(
            f"{directory}: has no metrics.jsonl, so it is not a run, or has not started training "
            "-> name a run's output.directory"
        )


def _names(places: Sequence[Path]) -> list[str]:
    """Return the shortest unique suffixes of the paths."""
    for length in range(1, max(len(place.parts) for place in places) + 1):
        names = ["/".join(place.parts[-length:]) for place in places]
        if len(set(names)) == len(names):
            return names
    return [str(place) for place in places]
