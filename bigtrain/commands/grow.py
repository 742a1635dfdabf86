"""`bigtrain grow`: a Hugging Face model with embedding rows for the tokens added to its
tokenizer."""

from __future__ import annotations

import argparse
import sys


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
