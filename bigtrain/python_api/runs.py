"""Run directories: checkpoints, verification, report, copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bigtrain.errors import DataError, ModelError

if TYPE_CHECKING:
    from bigtrain.run.checkpointing.listing import ListedCheckpoint


def list_checkpoints(run: str | Path) -> list[ListedCheckpoint]:
    """Return the checkpoints in a run directory, oldest first: complete or corrupt (by sizes; by
    contents of small files), the topology that wrote each, and why it is kept.

    Raises CheckpointError if there is none.
    """
    from bigtrain.run.checkpointing.listing import listed_checkpoints

    return listed_checkpoints(Path(run))


def verify_run(run: str | Path, step: int | None = None) -> dict[int, str | None]:
    """Read the checkpoints of a run again and compare every checksum; return by step why it is
    corrupt, None if it is complete.

    step: of one checkpoint (default: all of them). Raises CheckpointError if there is none.
    """
    return dict(verified_checkpoints(run, step))


def verified_checkpoints(run: str | Path, step: int | None) -> Iterator[tuple[int, str | None]]:
    """Yield the results of `verify_run` one by one."""
    from bigtrain.run.checkpointing.listing import verify_checkpoints

    return verify_checkpoints(Path(run), step)


def verify_model(directory: str | Path) -> int:
    """Read the weights of an export again and compare every checksum; return the number of
    files. Raise ModelError with every corrupt one."""
    from bigtrain.models.weights.checksums import corrupt_weights

    num_files, corrupt = corrupt_weights(Path(directory))
    if corrupt:
        raise ModelError("\n".join(f"{directory} is corrupt: {text}" for text in corrupt))
    return num_files


@dataclass(frozen=True)
class WrittenReport:
    """Report page: its path, its number of logged steps, and its size in bytes."""

    path: Path
    num_steps: int
    num_bytes: int


def write_report(
    run: str | Path, *, compare: Sequence[str | Path] = (), output: str | Path | None = None
) -> WrittenReport:
    """Write a run as one HTML page: curves, events, settings.

    compare: directories of more runs, drawn into the same charts. output: the page (default:
    report.html in the directory of `run`); an older report is replaced, any other file is not.
    Raises DataError and OutputError.
    """
    from bigtrain.report.output import write_page
    from bigtrain.report.page import page_html
    from bigtrain.report.run import open_runs

    runs = open_runs([Path(run), *map(Path, compare)], final=True)
    path = Path(run) / "report.html" if output is None else Path(output)
    html = page_html(runs)
    write_page(path, html)
    steps = sum(one.metrics.steps.num_rows for one in runs)
    return WrittenReport(path, steps, len(html))


@dataclass(frozen=True)
class Fetched:
    """Result of a fetch: its bytes, and for a run the step of the checkpoint."""

    directory: Path
    num_bytes: int
    step: int | None


def fetch(
    address: str,
    directory: str | Path,
    *,
    step: int | None = None,
    say: Callable[[str], None] | None = None,
) -> Fetched:
    """Copy a run, a model or a dataset from an address (s3://, https://, ...) to a directory.

    step: for a run, the checkpoint to fetch (default: the newest complete one); the others are not
    fetched. say: gets a line on each file. When called again, it resumes. Raises
    DataError; fetched files are kept.
    """
    from bigtrain.system.storage.addresses import is_address, without_secrets
    from bigtrain.system.storage.copies import fetch_tree, list_tree, newest_first

    if not is_address(address):
        raise DataError(f"{address} is not an address, such as s3://bucket/runs/mine -> cp -r")
    address = address.rstrip("/")
    steps = newest_first(list(list_tree(address)))
    if step is not None and step not in steps:
        listed = ", ".join(map(str, steps)) or "none"
        raise DataError(
            f"{without_secrets(address)} has no complete checkpoint of step {step} -> one of "
            f"{listed}"
        )
    wanted = steps[0] if steps and step is None else step

    def is_wanted(name: str) -> bool:
        if not name.startswith("checkpoints/"):
            return True
        return wanted is not None and name.startswith(f"checkpoints/step-{wanted:08d}/")

    target = Path(directory)
    try:
        num_bytes = fetch_tree(address, target, is_wanted, say or (lambda text: None))
    except OSError as error:
        raise DataError(f"{target} cannot be written: {error}") from error
    return Fetched(target, num_bytes, wanted)
