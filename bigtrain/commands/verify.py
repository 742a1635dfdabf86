"""`bigtrain verify`: read every byte of a run's checkpoints and compare the checksums."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--run", required=True, type=Path, help="run directory")
    parser.add_argument("--step", type=int, help="of one checkpoint (default: all of them)")


def run(args: argparse.Namespace) -> int:
    """Print a line for each; exit code 0 if all are whole, or else 2."""
    from bigtrain.errors import EXIT_USER_ERROR
    from bigtrain.run.inventory import verify_checkpoints

    are_whole = True
    for line, is_whole in verify_checkpoints(args.run, args.step):
        print(line, flush=True)
        are_whole &= is_whole
    return 0 if are_whole else EXIT_USER_ERROR
