"""`bigtrain tokenize`: turn text into token shards."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from bigtrain.commands.arguments import add_input_arguments, positive_int, reading_of, size
from bigtrain.commands.conversations import add_conversation_arguments, row_format_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `bigtrain tokenize`."""
    add_input_arguments(parser)
    add_conversation_arguments(parser)
    parser.add_argument(
        "--tokenizer", required=True, help="directory or name on the Hugging Face hub"
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
        help="bytes of input per shard, as far as a file can be split; also the most work that is "
        "lost when a worker is killed (default: 256MiB)",
    )
    _add_work_arguments(parser)
    parser.add_argument(
        "--encoder",
        choices=("auto", "gigatoken", "fastokens", "reference"),
        default="auto",
        help="auto takes the fastest that agrees with the reference on texts of edge cases and on "
        "a share of the documents; the tokens are the same with each (default: auto)",
    )
    parser.add_argument(
        "--parse-special-tokens",
        action="store_true",
        help="parse special tokens, such as <|endoftext|>, in the text of documents, as Megatron's "
        "script does; without it they are plain text",
    )


def _add_work_arguments(parser: argparse.ArgumentParser) -> None:
    """Who does the work; nothing of it changes the result."""
    parser.add_argument(
        "--workers",
        type=positive_int,
        metavar="N",
        help="processes that build shards; 1 is this process alone, with threads (default: all "
        "cores, in as many processes as have 256 MiB of input and 1 GiB of free memory each)",
    )
    parser.add_argument(
        "--rank",
        type=int,
        metavar="R",
        help="rank of this command among several with the same --output on different nodes; taken "
        "from torchrun, Slurm or a Kubernetes indexed job if not given",
    )
    parser.add_argument("--world-size", type=int, metavar="W", help="number of such commands")


def run(args: argparse.Namespace) -> int:
    """Tokenize and print a summary. Raises DataError; then only finished work is left behind."""
    from bigtrain.data.shards.inspection import summary
    from bigtrain.data.shards.manifest import DEFAULT_SHARD_BYTES, OptionsRecord
    from bigtrain.data.tokenize_job.job import build_dataset
    from bigtrain.data.tokenize_job.request import BuildRequest
    from bigtrain.data.tokenize_job.work_division import find_worker_rank

    reading = reading_of(args)
    rows = row_format_of(args, reading)
    options = OptionsRecord(
        text_keys=reading.text_keys if rows is None else rows.keys,
        held_out=args.held_out,
        shard_bytes=args.shard_size or DEFAULT_SHARD_BYTES,
        max_document_bytes=reading.max_document_bytes,
        max_bad_fraction=args.max_bad_fraction,
        parse_special_tokens=args.parse_special_tokens,
        chat=rows is not None,
        chat_format="messages" if rows is None else rows.name,
        learned=args.learn,
        roles=() if rows is None else rows.roles,
        dataset_config=reading.selection.dataset_config,
        dataset_split=reading.selection.dataset_split,
    )
    started_at = time.monotonic()
    result = build_dataset(
        BuildRequest(
            reading.selection,
            options,
            args.tokenizer,
            args.output,
            chat_template=args.chat_template,
            encoder=args.encoder,
            workers=args.workers,
            share=find_worker_rank(os.environ, args.rank, args.world_size),
        )
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
