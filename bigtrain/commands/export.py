"""`bigtrain export`: a run's weights as a verified Hugging Face directory, adapters as peft's."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--run", required=True, type=Path, help="run directory")
    parser.add_argument("--step", type=int, help="checkpoint to export (default: the newest)")
    parser.add_argument(
        "--best",
        action="store_true",
        help="export the best checkpoint by the run's evaluation.best",
    )
    parser.add_argument("--output", required=True, type=Path, help="directory to write")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the stored weights (default: the run's compute dtype; for adapters: float32)",
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="for a run with adapters: export the full model with the adapters merged into its "
        "weights",
    )
    parser.add_argument(
        "--max-shard-size",
        type=_size,
        default="5GB",
        help="largest size of a weight file (default: 5GB), and of the memory for writing; "
        "a larger tensor gets a separate file",
    )
    parser.add_argument(
        "--push-to-hub",
        metavar="OWNER/NAME",
        help="also upload the verified directory to this repository of the Hugging Face Hub, which "
        "is created if it does not exist (login: hf auth login, or HF_TOKEN)",
    )
    parser.add_argument(
        "--private", action="store_true", help="make a new repository of --push-to-hub private"
    )


def _size(text: str) -> str:
    if re.fullmatch(r"[1-9]\d*(KB|MB|GB|TB)", text.upper()) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500MB or 5GB")
    return text.upper()


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
