"""`bigtrain checkpoints`: list a run's checkpoints, or the runs that trained adapters by their
base."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from bigtrain.system.arguments import Argument
from bigtrain.system.next_commands import next_lines, run_lines


@dataclass(frozen=True, kw_only=True)
class CheckpointsArguments:
    """Command line of `bigtrain checkpoints`."""

    run: Annotated[Path | None, Argument(one_of="exactly one")] = None
    """run directory"""
    adapters: Annotated[Path | None, "DIRECTORY", Argument(one_of="exactly one")] = None
    """list the runs in and below it that trained adapters, by their base model"""


def run(args: CheckpointsArguments) -> int:
    """Print one line for each, oldest first. For tensor files only the sizes are compared."""
    from bigtrain.run.checkpointing.listing import describe_adapters, describe_checkpoints

    if args.run is not None:
        lines = describe_checkpoints(args.run)
    else:
        assert args.adapters is not None, "one of the two is required"
        lines = describe_adapters(args.adapters)
    for line in lines:
        print(line)
    if args.run is not None:
        print(next_lines(*run_lines(args.run, None)))
    else:
        print(next_lines("bigtrain export --run RUN --output DIRECTORY"))
    return 0
