"""`bigtrain checkpoints`: list a run's checkpoints, or the runs that trained adapters by their
base."""

from __future__ import annotations

import argparse


def run(args: argparse.Namespace) -> int:
    """Print one line for each, oldest first. For tensor files only the sizes are compared."""
    from bigtrain.run.checkpointing.listing import describe_adapters, describe_checkpoints

    lines = describe_checkpoints(args.run) if args.run else describe_adapters(args.adapters)
    for line in lines:
        print(line)
    return 0
