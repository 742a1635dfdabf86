"""`bigtrain fetch`: copy a run, a model or a dataset from an address to a directory."""

from __future__ import annotations

import argparse
from pathlib import Path

from bigtrain.errors import DataError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("address", help="where it lies, such as s3://bucket/runs/mine")
    parser.add_argument("output", type=Path, help="directory to copy it to")
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="of a run: the checkpoint to fetch (default: the newest complete one)",
    )


def run(args: argparse.Namespace) -> int:
    """Fetch what is not there yet. Raises DataError; what has come stays for the next start."""
    from bigtrain.system.storage.addresses import is_address, without_secrets
    from bigtrain.system.storage.copies import fetch_tree, list_tree, newest_first

    if not is_address(args.address):
        raise DataError(f"{args.address} is no address, such as s3://bucket/runs/mine -> cp -r")
    address = args.address.rstrip("/")
    steps = newest_first(list(list_tree(address)))
    if args.step is not None and args.step not in steps:
        listed = ", ".join(map(str, steps)) or "none"
        raise DataError(
            f"{without_secrets(address)} has no complete checkpoint of step {args.step} -> of "
            f"these: {listed}"
        )
    step = steps[0] if steps and args.step is None else args.step

    def is_wanted(name: str) -> bool:
        if not name.startswith("checkpoints/"):
            return True
        return step is not None and name.startswith(f"checkpoints/step-{step:08d}/")

    try:
        num_bytes = fetch_tree(address, args.output, is_wanted, print)
    except OSError as error:
        raise DataError(f"{args.output} cannot be written: {error}") from error
    print(f"{args.output}: {num_bytes:,} bytes from {without_secrets(address)}")
    if step is not None:
        print(f"  the run resumes from step {step} with output.directory={args.output}")
    return 0
