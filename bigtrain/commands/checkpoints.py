"""`bigtrain checkpoints`: the checkpoints of a run, whether complete, and why they stay."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--run", required=True, type=Path, help="run directory")


def run(args: argparse.Namespace) -> int:
    """Print one line for each, oldest first. Tensor files are compared by size alone."""
    from bigtrain.run.checkpointing.listing import describe_checkpoints

    for line in describe_checkpoints(args.run):
        print(line)
    return 0
