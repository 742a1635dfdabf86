"""Arguments that several subcommands share. Pure."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bigtrain.data.sources import Selection


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    """Which text to read: the arguments that `selection_of` understands."""
    parser.add_argument(
        "--input",
        required=True,
        nargs="+",
        action="extend",
        metavar="INPUT",
        help="files, folders, globs, directories of Dataset.save_to_disk, or hub datasets",
    )
    parser.add_argument(
        "--text-key",
        default="text",
        metavar="KEY",
        help="where a JSON line, a column or a dataset holds the document (default: text)",
    )
    parser.add_argument(
        "--suffix",
        action="append",
        default=[],
        type=_suffix,
        metavar=".SUFFIX",
        help="files to take from folders, also with .gz, .zst, .xz or .bz2 after it; may be "
        "repeated (default: .txt .jsonl .parquet)",
    )
    parser.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="GLOB",
        help="files and folders to leave out, by name or by path below the input; may be repeated",
    )
    parser.add_argument(
        "--skip-bad",
        action="store_true",
        help="count and leave out documents that cannot be read, instead of stopping",
    )
    parser.add_argument("--dataset-config", metavar="NAME", help="configuration of a hub dataset")
    parser.add_argument(
        "--dataset-split",
        default="train",
        metavar="SPLIT",
        help="split of a hub or saved dataset (default: train)",
    )


def selection_of(args: argparse.Namespace) -> Selection:
    """The inputs that parsed arguments name."""
    from bigtrain.data.sources import DEFAULT_SUFFIXES, Selection

    return Selection(
        inputs=tuple(args.input),
        suffixes=tuple(args.suffix or DEFAULT_SUFFIXES),
        exclude=tuple(args.exclude),
        dataset_config=args.dataset_config,
        dataset_split=args.dataset_split,
    )


def positive_int(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def _suffix(text: str) -> str:
    return text if text.startswith(".") else f".{text}"
