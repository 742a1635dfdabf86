"""`bigtrain tokenize`: turn text into token shards."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from bigtrain.commands.arguments import add_input_arguments, positive_int, reading_of, size
from bigtrain.commands.conversations import add_conversation_arguments, conversations_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `bigtrain tokenize`."""
    add_input_arguments(parser)
    add_conversation_arguments(parser)
    parser.add_argument(
        "--tokenizer", required=True, help="directory or name on the Hugging Face Hub"
    )
    parser.add_argument("--output", required=True, type=Path, help="directory to write")
    parser.add_argument(
        "--held-out",
        type=_fraction,
        default=0.0,
        metavar="FRACTION",
        help="share of the documents kept for evaluation, chosen by their content (default: 0)",
    )
    parser.add_argument(
        "--shard-size",
        type=size,
        metavar="SIZE",
        help="bytes of input per shard, if a file can be split; also the maximum work "
        "lost when a worker is killed (default: 256MiB)",
    )
    _add_work_arguments(parser)
    parser.add_argument(
        "--encoder",
        choices=("auto", "gigatoken", "fastokens", "reference"),
        default="auto",
        help="auto selects the fastest that agrees with the reference on edge cases and on "
        "a share of the documents; the tokens are the same with each (default: auto)",
    )
    parser.add_argument(
        "--parse-special-tokens",
        action="store_true",
        help="parse special tokens, such as <|endoftext|>, in the text of documents, as Megatron's "
        "script does; without it they are plain text",
    )
    parser.add_argument(
        "--beginning-of-text",
        choices=("auto", "always", "never"),
        default="auto",
        help="start of plain-text documents and prompts: auto: tokens that the tokenizer "
        "itself adds to a text (Llama 3, Gemma: their beginning-of-text token; many: nothing), "
        "always: its beginning-of-text token, never: nothing; generate and evaluation do the same "
        "(default: auto)",
    )
    parser.add_argument(
        "--end-of-document",
        metavar="TOKEN",
        help="token that ends documents of plain text, such as <|endoftext|> if the tokenizer's "
        "end-of-sequence token ends a turn (default: the end-of-sequence token)",
    )


def _add_work_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the division of work, which does not change the result."""
    parser.add_argument(
        "--workers",
        type=positive_int,
        metavar="N",
        help="processes that build shards; 1 is only this process, with threads (default: all "
        "cores, in as many processes as have 256 MiB of input and 1 GiB of free memory each)",
    )
    parser.add_argument(
        "--rank",
        type=int,
        metavar="R",
        help="rank of this command among several with the same --output on different nodes; "
        "default: from torchrun, Slurm or a Kubernetes indexed job",
    )
    parser.add_argument("--world-size", type=int, metavar="W", help="number of such commands")


def run(args: argparse.Namespace) -> int:
    """Tokenize and print a summary. Raises DataError; then only finished work is kept."""
    from bigtrain.data.shards.inspection import summary
    from bigtrain.python_api.tokenizing import build_tokens

    started_at = time.monotonic()
    result = build_tokens(
        args.input,
        args.tokenizer,
        args.output,
        **reading_of(args),
        **conversations_of(args),
        held_out=args.held_out,
        shard_bytes=args.shard_size,
        max_bad_fraction=args.max_bad_fraction,
        max_unrendered=args.max_unrendered,
        workers=args.workers,
        rank=args.rank,
        world_size=args.world_size,
        encoder=args.encoder,
        parse_special_tokens=args.parse_special_tokens,
        beginning_of_text=args.beginning_of_text,
        end_of_document=args.end_of_document,
    )
    if result.already_finished:
        print(f"{args.output} is already the finished dataset of this input; nothing to do")
    print(summary(args.output, result.manifest))
    if not result.already_finished:
        elapsed_s = time.monotonic() - started_at
        tokens = result.built_tokens
        print(f"  {elapsed_s:.1f} s, {tokens:,} tokens here, {tokens / elapsed_s:,.0f} tokens/s")
    return 0


def _fraction(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not a fraction from 0 to below 1")
    return value
