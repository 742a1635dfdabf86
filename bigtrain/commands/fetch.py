"""`bigtrain fetch`: copy a run, a model or a dataset from an address to a directory."""

from __future__ import annotations

import argparse


def run(args: argparse.Namespace) -> int:
    """Fetch missing files. Raise DataError; fetched files are kept for the next start."""
    from bigtrain.errors import without_secrets
    from bigtrain.python_api.results import fetch

    fetched = fetch(args.address, args.output, step=args.step, say=print)
    address = without_secrets(args.address.rstrip("/"))
    print(f"{args.output}: {fetched.num_bytes:,} bytes from {address}")
    if fetched.step is not None:
        print(f"  the run resumes from step {fetched.step} with output.directory={args.output}")
    return 0
