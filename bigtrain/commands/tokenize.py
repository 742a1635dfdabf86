"""`bigtrain tokenize`: turn text into token shards."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigtrain.commands.arguments import add_input_arguments, positive_int, reading_of, size
from bigtrain.errors import DataError

if TYPE_CHECKING:
    from bigtrain.data.documents.parts import ReadOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `bigtrain tokenize`."""
    add_input_arguments(parser)
    parser.add_argument(
        "--chat-key",
        metavar="KEY",
        help="instead of --text-key: the key that holds a conversation, a list of messages with "
        "role and content (its tools are in the key `tools`); rendered by the tokenizer's chat "
        "template, with loss on the assistant's tokens only",
    )
    parser.add_argument(
        "--format",
        choices=("auto", "text", "messages", "sharegpt", "alpaca", "prompt-completion"),
        default="auto",
        help="what a row holds; auto detects it from the keys of the first row, and prints it, if "
        "neither --text-key nor --chat-key is given; for a named pipe it is text (default: auto)",
    )
    parser.add_argument(
        "--key",
        action="append",
        default=[],
        metavar="NAME=KEY",
        help="name in the data of a key of --format, such as instruction=question",
    )
    parser.add_argument(
        "--learn",
        choices=("all", "last"),
        default="all",
        help="which answers of the assistant in a conversation have loss: all, or only the last "
        "one (default: all)",
    )
    parser.add_argument(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="Jinja file to render conversations with instead of the tokenizer's own",
    )
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


def run(args: argparse.Namespace) -> int:
    """Tokenize and print a summary. Raises DataError; then only finished work is left behind."""
    from bigtrain.data.shards.inspection import summary
    from bigtrain.data.shards.manifest import DEFAULT_SHARD_BYTES, OptionsRecord
    from bigtrain.data.tokenize_job.job import build_dataset
    from bigtrain.data.tokenize_job.request import BuildRequest
    from bigtrain.data.tokenize_job.work_division import find_worker_rank

    if args.chat_key is not None and args.text_key:
        raise DataError(f"--text-key and --chat-key {args.chat_key} exclude each other")
    reading = reading_of(args)
    chat = _conversations(args, reading)
    if args.chat_template is not None and chat is None:
        raise DataError("--chat-template is for conversations -> name their key: --chat-key")
    if args.learn != "all" and chat is None:
        raise DataError("--learn last is for conversations -> --format messages, or leave it out")
    options = OptionsRecord(
        text_keys=reading.text_keys if chat is None else chat[1],
        held_out=args.held_out,
        shard_bytes=args.shard_size or DEFAULT_SHARD_BYTES,
        max_document_bytes=reading.max_document_bytes,
        max_bad_fraction=args.max_bad_fraction,
        parse_special_tokens=args.parse_special_tokens,
        chat=chat is not None,
        chat_format="messages" if chat is None else chat[0],
        learned=args.learn,
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


def _conversations(
    args: argparse.Namespace, reading: ReadOptions
) -> tuple[Any, tuple[str, ...]] | None:
    """The format of conversations and its keys in a row; None for text. Raises DataError."""
    from bigtrain.data.documents.chat_formats import FORMATS, nearest
    from bigtrain.data.documents.first_row import keys_of_first_row

    names = dict(_renamed(pair) for pair in args.key)
    name = args.format
    if args.chat_key is not None:
        if name not in ("auto", "messages"):
            raise DataError(f"--chat-key is of --format messages, and --format is {name} -> --key")
        name, names = "messages", {"messages": args.chat_key, **names}
    if name == "auto":
        found = None if args.text_key else nearest(keys_of_first_row(reading))
        name = "text" if found is None else found.name
        if found is not None:
            print(f"the keys of the first row are those of --format {name}", file=sys.stderr)
    if name == "text":
        if names:
            raise DataError("--key names keys of conversations -> --text-key for text")
        return None
    known = FORMATS[name].keys
    wrong = next((key for key in names if key not in known), None)
    if wrong is not None:
        raise DataError(f"--key {wrong}: --format {name} has no such key -> {', '.join(known)}")
    keys = tuple(names.get(key, key) for key in known)
    # For messages the key `tools` is implied: it is not recorded, as in earlier versions.
    return name, keys[:1] if name == "messages" and keys[1:] == known[1:] else keys


def _renamed(pair: str) -> tuple[str, str]:
    name, equals, key = pair.partition("=")
    if not (name and equals and key):
        raise DataError(f"--key {pair}: not NAME=KEY, such as instruction=question")
    return name, key


def _fraction(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not a fraction from 0 to below 1")
    return value
