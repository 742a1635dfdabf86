"""`bigtrain merge`: the mean of several checkpoints as a verified Hugging Face directory."""

from __future__ import annotations

import argparse
import sys


def run(args: argparse.Namespace) -> int:
    """Write and verify the directory. Raises ConfigError, CheckpointError, ModelError."""
    from bigtrain.python_api.results import merge_run

    steps = merge_run(
        args.run,
        args.output,
        steps=args.steps or (),
        last=args.last,
        weights=args.weights or (),
        dtype=args.dtype,
        max_shard_size=args.max_shard_size,
        warn=lambda text: print(f"bigtrain merge: {text}", file=sys.stderr),
    )
    print(
        f"{args.output}: mean of steps {', '.join(map(str, steps))}, reloaded with transformers "
        "and compared: same logits"
    )
    return 0
