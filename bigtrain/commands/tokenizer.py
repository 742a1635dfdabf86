"""`bigtrain tokenizer`: train a byte-level BPE tokenizer on text, or add tokens to one."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bigtrain.commands.arguments import add_input_arguments, positive_int, reading_of
from bigtrain.errors import DataError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `bigtrain tokenizer`."""
    add_input_arguments(parser, required=False)
    parser.add_argument(
        "--vocab-size",
        type=positive_int,
        metavar="N",
        help="tokens of the vocabulary, the end-of-document token among them; at least 257",
    )
    parser.add_argument(
        "--base",
        metavar="NAME",
        help="instead of --input and --vocab-size: take this tokenizer (directory or hub name), "
        "and add tokens to it",
    )
    parser.add_argument(
        "--add-token",
        action="append",
        default=[],
        metavar="TEXT",
        help="text that becomes one token of --base; may be repeated",
    )
    parser.add_argument(
        "--add-special-token",
        action="append",
        default=[],
        metavar="TEXT",
        help="the same for a control token, such as <|im_start|>: the text of documents never "
        "becomes it, and decoding can leave it out; may be repeated",
    )
    parser.add_argument("--output", required=True, type=Path, help="directory to write")


def run(args: argparse.Namespace) -> int:
    """Train or grow, save and print a summary. Raises DataError; then nothing is left behind."""
    if args.base is not None:
        return _grow(args)
    if not args.input or args.vocab_size is None:
        raise DataError("--input and --vocab-size train a tokenizer; or --base takes one")
    if args.add_token or args.add_special_token:
        raise DataError("--add-token and --add-special-token are for an existing tokenizer: --base")
    return _train(args)


def _grow(args: argparse.Namespace) -> int:
    from bigtrain.data.tokenizers.added_tokens import add_tokens
    from bigtrain.system.files import new_directory, require_free

    if args.input or args.vocab_size is not None:
        raise DataError("--base takes a trained tokenizer -> leave out --input and --vocab-size")
    require_free(args.output)
    tokenizer, ids = add_tokens(args.base, args.add_token, args.add_special_token)
    with new_directory(args.output) as directory:
        tokenizer.save(directory)
    added = ", ".join(f"{text} {number}" for text, number in ids.items())
    print(
        f"{args.output}: {args.base} with {len(ids)} token{'s' if len(ids) != 1 else ''} added "
        f"({added}), {tokenizer.vocab_size} tokens in all"
    )
    print("trained weights get rows for them by model.vocabulary.new_rows=mean_covariance")
    return 0


def _train(args: argparse.Namespace) -> int:
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
