"""`bigtrain export`: a run's weights as a verified Hugging Face directory, adapters as peft's."""

from __future__ import annotations

import argparse
import sys


def run(args: argparse.Namespace) -> int:
    """Write and verify the directory, and upload it to the Hub if requested.

    Raises ConfigError, before anything is written, if the Hub cannot be used."""
    from bigtrain.python_api.results import export_run

    exported = export_run(
        args.run,
        args.output,
        step=args.step,
        best=args.best,
        dtype=args.dtype,
        merge=args.merge,
        average=args.average,
        max_shard_size=args.max_shard_size,
        push_to_hub=args.push_to_hub,
        private=args.private,
        warn=lambda text: print(f"bigtrain export: {text}", file=sys.stderr),
    )
    print(
        f"{args.output}: step {exported.step}, reloaded with transformers and compared: same logits"
    )
    if exported.address is not None:
        print(f"pushed to {exported.address}")
    return 0
