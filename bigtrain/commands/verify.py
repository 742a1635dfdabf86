"""`bigtrain verify`: read token datasets or a run's checkpoints again, and compare checksums."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from bigtrain.errors import EXIT_USER_ERROR, ConfigError, Problem
from bigtrain.system.arguments import Argument, Directory
from bigtrain.system.next_commands import model_line, next_lines, run_lines, shards_line


@dataclass(frozen=True, kw_only=True)
class VerifyArguments:
    """Command line of `bigtrain verify`."""

    datasets: Annotated[tuple[Path, ...], "DATASET", Argument("datasets", nargs="*")] = ()
    """written by `bigtrain tokenize`"""
    run: Directory | None = None
    """run directory whose checkpoints are read"""
    model: Directory | None = None
    """written by `bigtrain export`: its weights"""
    step: int | None = None
    """step of one checkpoint (default: all of them)"""


def run(args: VerifyArguments) -> int:
    """Print a line for each; exit code 0 if all are complete and correct, else 2.

    Raises DataError with every corrupt file of a dataset.
    """
    if not args.datasets and args.run is None and args.model is None:
        remedy = "name a DATASET, --run DIR or --model DIR"
        problem = Problem("arguments", None, "nothing to verify", remedy)
        raise ConfigError(problem)
    from bigtrain.data.shards.dataset import open_dataset
    from bigtrain.python_api.shards import verify_shards

    next_line = ""
    # Datasets.
    verify_shards(*args.datasets)
    for path in args.datasets:
        splits = open_dataset(path, check="index").table.splits.values()
        num_shards, tokens = sum(map(len, splits)), sum(split.num_tokens for split in splits)
        print(f"{path}: {num_shards} shards, {tokens:,} tokens, all checksums match")
        next_line = shards_line(path)
    # An exported model.
    if args.model is not None:
        from bigtrain.python_api.results import verify_model

        num_files = verify_model(args.model)
        print(f"{args.model}: {num_files} files, all checksums match")
        next_line = model_line(args.model)
    if args.run is None:
        print(next_lines(next_line))
        return 0
    from bigtrain.run.checkpointing import checkpoints
    from bigtrain.run.checkpointing.listing import one_site_note, verify_checkpoints

    # Checkpoints of a run: all are listed, and a corrupt one makes the exit code 2.
    all_complete, site_note = True, ""
    for step, reason in verify_checkpoints(args.run, args.step):
        status = "corrupt: " + reason if reason else "complete, all checksums match"
        print(f"step {step}: {status}", flush=True)
        all_complete &= reason is None
        if reason is None:
            directory = checkpoints.checkpoint_path(args.run, step)
            site_note = one_site_note(checkpoints.read_state(directory))
    if site_note:
        print(f"{args.run}: {site_note}")
    if all_complete:
        print(next_lines(*run_lines(args.run, None)))
    return 0 if all_complete else EXIT_USER_ERROR
