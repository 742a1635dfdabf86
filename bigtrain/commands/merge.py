"""`bigtrain merge`: the mean of several checkpoints as a verified Hugging Face directory."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from bigtrain.commands.arguments import Dtype, NewDirectory, shard_size
from bigtrain.system.arguments import Argument, Positive, positive_int
from bigtrain.system.next_commands import model_line, next_lines


def steps(text: str) -> list[int]:
    """Parse checkpoints by step: 100,200."""
    return [positive_int(word) for word in text.split(",")]


def shares(text: str) -> list[float]:
    """Parse shares: 1,1,2."""
    try:
        return [float(word) for word in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text} is not a list of numbers such as 1,1,2"
        ) from error


@dataclass(frozen=True, kw_only=True)
class MergeArguments:
    """Command line of `bigtrain merge`."""

    run: Path
    """run directory"""
    last: Positive | None = None
    """the last N complete checkpoints"""
    steps: Annotated[tuple[int, ...], steps, "STEP,STEP", Argument(action="store")] = ()
    """checkpoints to merge, instead of --last"""
    weights: Annotated[tuple[float, ...], shares, "W,W", Argument(action="store")] = ()
    """share of each checkpoint, oldest first or in the order of --steps (default: equal)"""
    output: NewDirectory
    dtype: Dtype | None = None
    """of the stored weights (default: the dtype of each tensor in the base; without a base the
    run's precision.dtype)"""
    max_shard_size: Annotated[str, shard_size] = "5GB"
    """largest size of a weight file (default: 5GB)"""


def run(args: MergeArguments) -> int:
    """Write and verify the directory. Raises ConfigError, CheckpointError, ModelError."""
    from bigtrain.python_api.results import merge_run

    steps = merge_run(
        args.run,
        args.output,
        steps=args.steps,
        last=args.last,
        weights=args.weights,
        dtype=args.dtype,
        max_shard_size=args.max_shard_size,
        warn=lambda text: print(f"bigtrain merge: {text}", file=sys.stderr),
    )
    print(
        f"{args.output}: mean of steps {', '.join(map(str, steps))}, reloaded with transformers "
        "and compared: same logits"
    )
    print(next_lines(model_line(args.output)))
    return 0
