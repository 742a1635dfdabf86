"""Arguments that several subcommands share. Pure."""

from __future__ import annotations

import argparse
import re
from typing import Any

EXIT_CODES = (
    "Exit codes: 0 done; 2 a problem with the arguments or their files, reported in one "
    "message; 1 an error of bigtrain itself, with a traceback."
)
"""Epilog of every command's help."""


def add_input_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add the arguments for reading text, which `reading_of` converts.

    `required`: whether the command always needs an input."""
    from bigtrain.data.documents.files import COMPRESSION_SUFFIXES
    from bigtrain.data.documents.formats import DEFAULT_SUFFIXES, READERS, ROW_SUFFIXES

    compressed = f"{', '.join(COMPRESSION_SUFFIXES[:-1])} or {COMPRESSION_SUFFIXES[-1]}"
    tables = " and ".join(reader.kind for reader in READERS if reader.random_access)
    parser.add_argument(
        "--input",
        required=required,
        nargs="+",
        action="extend",
        metavar="INPUT",
        help="files, folders, globs, directories of Dataset.save_to_disk, Hub datasets, - for "
        "standard input, or addresses (s3://, gs://, az://, hf://, https:// and all that fsspec "
        f"supports) of files, folders and globs. Files: {', '.join(ROW_SUFFIXES)}, or else text, "
        f"each also compressed ({compressed}). Compressed {tables} files are decompressed next to "
        "the output while they are read: this needs space for the largest, once per worker",
    )
    parser.add_argument(
        "--text-key",
        action="append",
        default=[],
        type=_keys,
        metavar="KEY",
        help="key or column of the document (default: text); with several (a,b, or "
        "repeated) those that a row has are joined by a newline",
    )
    parser.add_argument(
        "--suffix",
        action="append",
        default=[],
        type=_suffix,
        metavar=".SUFFIX",
        help=f"suffix of files to read in folders, also followed by {compressed}; may be repeated "
        f"(default: {' '.join(DEFAULT_SUFFIXES)})",
    )
    parser.add_argument(
        "--read-as",
        default=None,
        type=_suffix,
        metavar=".SUFFIX",
        help="read every input file as if it had this suffix, such as .jsonl.gz (default: by its "
        "own name; for standard input .jsonl)",
    )
    parser.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="GLOB",
        help="files and folders to skip, by name or by path below the input; may be repeated",
    )
    parser.add_argument(
        "--follow-links",
        action="store_true",
        help="read targets of a folder's links outside of it, files and folders; without it "
        "such a link is an error, which names it",
    )
    _add_limits(parser)
    parser.add_argument("--dataset-config", metavar="NAME", help="configuration of a Hub dataset")
    parser.add_argument(
        "--dataset-split",
        default="train",
        metavar="SPLIT",
        help="split of a Hub or saved dataset (default: train)",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """Add the limits on bad documents."""
    parser.add_argument(
        "--max-document-bytes",
        type=size,
        metavar="SIZE",
        help="a larger document, or line, is bad (default: 64MiB)",
    )
    parser.add_argument(
        "--max-bad-fraction",
        type=_fraction_or_one,
        default=0.0,
        metavar="F",
        help="skip and count unreadable documents, up to this share of all; with 0, the "
        "default, the first one is an error",
    )
    parser.add_argument(
        "--skip-bad",
        action="store_const",
        const=1.0,
        dest="max_bad_fraction",
        help="same as --max-bad-fraction 1: skip all of them",
    )


def reading_of(args: argparse.Namespace) -> dict[str, Any]:
    """Convert the arguments of `add_input_arguments` to parameters of
    `bigtrain.python_api.tokenizing`, without the inputs and the limit of bad documents."""
    return {
        "text_keys": [key for keys in args.text_key for key in keys],
        "suffixes": args.suffix,
        "exclude": args.exclude,
        "dataset_config": args.dataset_config,
        "dataset_split": args.dataset_split,
        "max_document_bytes": args.max_document_bytes,
        "read_as": args.read_as or "",
        "follow_links": args.follow_links,
    }


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add the settings of the run that the command line changes."""
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="settings of the run to change, such as train.steps=20 (default: none)",
    )


def add_count(
    parser: argparse.ArgumentParser, flag: str, default: int, metavar: str, text: str
) -> None:
    """Add an option that takes an integer of at least 1; its help is `text` and the default."""
    help_text = f"{text} (default: {default})"
    parser.add_argument(flag, type=positive_int, default=default, metavar=metavar, help=help_text)


def positive_int(text: str) -> int:
    """Parse an argument: an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def count(text: str) -> int:
    """Parse an argument: an integer of at least 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is less than 0")
    return value


def size(text: str) -> int:
    """Parse an argument: bytes, as a number with or without a unit (KiB, MB, GiB, ...)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text} is not a size, such as 67108864, 64MiB or 1GB")
    number, unit, binary = match.groups()
    power = " kmgt".index(unit.lower()) if unit else 0
    value = int(float(number) * (1024 if binary else 1000) ** power)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1 byte")
    return value


def _keys(text: str) -> list[str]:
    return [key for key in text.split(",") if key]


def _fraction_or_one(text: str) -> float:
    value = float(text)
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not a fraction from 0 to 1")
    return value


def _suffix(text: str) -> str:
    return text if text.startswith(".") else f".{text}"
