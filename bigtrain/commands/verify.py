"""`bigtrain verify`: read token datasets again and compare every checksum."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `bigtrain verify`."""
    parser.add_argument("datasets", nargs="+", type=Path, metavar="DATASET")


def run(args: argparse.Namespace) -> int:
    """Raises DataError naming every file that is damaged."""
    from bigtrain.data.shards import damaged_files, open_dataset
    from bigtrain.errors import DataError

    damaged = [problem for path in args.datasets for problem in damaged_files(path)]
    if damaged:
        raise DataError("\n".join(damaged))
    for path in args.datasets:
        manifest = open_dataset(path, check="index").manifest
        shards = [shard for shards in manifest.splits.values() for shard in shards]
        tokens = sum(shard.tokens for shard in shards)
        print(f"{path}: {len(shards)} shards, {tokens:,} tokens, every checksum is right")
    return 0
