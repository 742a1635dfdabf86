"""`bigtrain export`: a run's weights as a verified Hugging Face directory."""

from __future__ import annotations

import argparse
import re
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--run", required=True, type=Path, help="run directory")
    parser.add_argument("--step", type=int, help="checkpoint to export (default: the newest)")
    parser.add_argument("--output", required=True, type=Path, help="directory to write")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the stored weights (default: the one the run computed in)",
    )
    parser.add_argument(
        "--max-shard-size",
        type=_size,
        default="5GB",
        help="of a file of weights (default: 5GB), and of the memory that writing takes; a larger "
        "tensor has a file of its own",
    )


def _size(text: str) -> str:
    if re.fullmatch(r"[1-9]\d*(KB|MB|GB|TB)", text.upper()) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 500MB or 5GB")
    return text.upper()


def run(args: argparse.Namespace) -> int:
    """Write and verify the directory, and say where it is."""
    from bigtrain.run.checkpointing.export import export_run

    step = export_run(
        args.run,
        args.output,
        step=args.step,
        dtype=args.dtype,
        max_shard_size=args.max_shard_size,
    )
    print(f"{args.output}: step {step}, reloaded with transformers and compared: same logits")
    return 0
