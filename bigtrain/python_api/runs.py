"""A run's directory: its checkpoints, whether they are complete, its report, a copy of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bigtrain.errors import DataError, ModelError

if TYPE_CHECKING:
    from bigtrain.run.checkpointing.listing import ListedCheckpoint


def list_checkpoints(run: str | Path) -> list[ListedCheckpoint]:
    """The checkpoints in a run directory, oldest first: complete or corrupt (by sizes; by contents
    of small files), the topology that wrote each, and why it is kept.

    Raises CheckpointError if there is none.
    """
    from bigtrain.run.checkpointing.listing import listed_checkpoints

    return listed_checkpoints(Path(run))


def verify_run(run: str | Path, step: int | None = None) -> dict[int, str | None]:
    """Read the checkpoints of a run again and compare every checksum: by step why it is corrupt,
    None where it is complete.

    step: of one checkpoint (default: all of them). Raises CheckpointError where there is none.
    """
    return dict(verified_checkpoints(run, step))


def verified_checkpoints(run: str | Path, step: int | None) -> Iterator[tuple[int, str | None]]:
    """As `verify_run`, one after the other."""
    from bigtrain.run.checkpointing.listing import verify_checkpoints

    return verify_checkpoints(Path(run), step)


def verify_model(directory: str | Path) -> int:
    """Read the weights of an export again and compare every checksum; returns how many files there
    are. Raises ModelError that names every corrupt one."""
    from bigtrain.models.weights.checksums import corrupt_weights

    num_files, corrupt = corrupt_weights(Path(directory))
    if corrupt:
        raise ModelError("\n".join(f"{directory} is corrupt: {text}" for text in corrupt))
    return num_files


@dataclass(frozen=True)
class WrittenReport:
    """A page: where it is, the logged steps in it, and its size in bytes."""

    path: Path
    num_steps: int
    num_bytes: int


def write_report(
    run: str | Path, *, compare: Sequence[str | Path] = (), output: str | Path | None = None
) -> WrittenReport:
    """Write a run as one HTML page: curves, events, settings.

    compare: directories of further runs, drawn into the same charts. output: the page (default:
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
    """What came from an address: its bytes, and of a run the step of the checkpoint."""

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

    step: of a run, the checkpoint to fetch (default: the newest complete one); the others stay
    there. say: gets a line on each file. Called again, it goes on where it stopped. Raises
    DataError; what has come stays.
    """
    from bigtrain.system.storage.addresses import is_address, without_secrets
    from bigtrain.system.storage.copies import fetch_tree, list_tree, newest_first

    if not is_address(address):
        raise DataError(f"{address} is no address, such as s3://bucket/runs/mine -> cp -r")
    address = address.rstrip("/")
    steps = newest_first(list(list_tree(address)))
    if step is not None and step not in steps:
        listed = ", ".join(map(str, steps)) or "none"
        raise DataError(
            f"{without_secrets(address)} has no complete checkpoint of step {step} -> of "
            f"these: {listed}"
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
