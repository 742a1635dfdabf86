"""`bigtrain tokenizer`: train a byte-level BPE tokenizer on text."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bigtrain.commands.arguments import add_input_arguments, positive_int, reading_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `bigtrain tokenizer`."""
    add_input_arguments(parser)
    parser.add_argument(
        "--vocab-size",
        required=True,
        type=positive_int,
        metavar="N",
        help="tokens of the vocabulary, the end-of-document token among them; at least 257",
    )
    parser.add_argument("--output", required=True, type=Path, help="directory to write")


def run(args: argparse.Namespace) -> int:
    """Train, save and print a summary. Raises DataError; then nothing is left behind."""
    from bigtrain.python_api.tokenizing import train_tokenizer

    num_tokens = train_tokenizer(
        args.input,
        args.vocab_size,
        args.output,
        **reading_of(args),
        max_bad_fraction=args.max_bad_fraction,
        say=print,
    )
    if num_tokens < args.vocab_size:
        print(
            f"note: the text gives {num_tokens} tokens, fewer than --vocab-size {args.vocab_size}",
            file=sys.stderr,
        )
    return 0
