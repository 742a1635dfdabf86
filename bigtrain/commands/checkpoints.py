"""`bigtrain checkpoints`: list a run's checkpoints, or the runs that trained adapters by their
base."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--run", type=Path, help="run directory")
    what.add_argument(
        "--adapters",
        type=Path,
        metavar="DIRECTORY",
        help="list the runs in and below it that trained adapters, by their base model",
    )


def run(args: argparse.Namespace) -> int:
    """Print one line for each, oldest first. For tensor files only the sizes are compared."""
    from bigtrain.run.checkpointing.listing import describe_adapters, describe_checkpoints

    lines = describe_checkpoints(args.run) if args.run else describe_adapters(args.adapters)
    for line in lines:
        print(line)
    return 0
