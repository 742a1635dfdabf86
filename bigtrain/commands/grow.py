"""`bigtrain grow`: a Hugging Face model with embedding rows for the tokens added to its
tokenizer."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bigtrain.commands.arguments import positive_int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--model", required=True, help="directory or Hub name of the base")
    parser.add_argument(
        "--tokenizer",
        required=True,
        help="directory or Hub name: the base's with added tokens (bigtrain tokenizer --base)",
    )
    parser.add_argument("--output", required=True, type=Path, help="directory to write")
    parser.add_argument(
        "--new-rows",
        choices=("mean_covariance", "mean", "normal"),
        default="mean_covariance",
        help="like model.vocabulary.new_rows of a run (default: mean_covariance)",
    )
    parser.add_argument(
        "--pad-to-multiple-of",
        type=positive_int,
        metavar="N",
        help="add rows up to a multiple of N",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of random rows (default: 0)"
    )


def run(args: argparse.Namespace) -> int:
    """Write and verify the directory. Raises ModelError or DataError; then nothing is written."""
    from bigtrain.python_api.results import grow_model

    growth = grow_model(
        args.model,
        args.tokenizer,
        args.output,
        new_rows=args.new_rows,
        pad_to_multiple_of=args.pad_to_multiple_of,
        seed=args.seed,
    )
    for note in growth.notes:
        print(f"bigtrain grow: {args.output}: {note}", file=sys.stderr)
    print(
        f"{args.output}: {args.model} with {growth.after} rows instead of {growth.before} "
        f"({', '.join(growth.names)}), reloaded and compared: same logits"
    )
    return 0
