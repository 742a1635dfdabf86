"""Arguments of the subcommands, by the table in arguments.yaml. Pure."""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

EXIT_CODES = (
    "Exit codes: 0 done; 2 a problem with the arguments or their files, reported in one "
    "message; 1 an error of bigtrain itself, with a traceback."
)
"""Epilog of every command's help."""


def reading_of(args: argparse.Namespace) -> dict[str, Any]:
    """Convert the arguments for reading text to parameters of
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
        "ignored_keys": args.ignore_key,
        "quotes": args.quotes,
    }


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


def _fraction_or_one(text: str) -> float:
    value = float(text)
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not a fraction from 0 to 1")
    return value


def _fraction(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not a fraction from 0 to below 1")
    return value


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: an integer from 1 to 65535")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration: a number above 0")
    return seconds


def _steps(text: str) -> list[int]:
    """Checkpoints by step: 100,200."""
    return [positive_int(word) for word in text.split(",")]


def _shares(text: str) -> list[float]:
    """Shares: 1,1,2."""
    try:
        return [float(word) for word in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text} is not a list of numbers such as 1,1,2"
        ) from error


def _shard_size(text: str) -> str:
    if re.fullmatch(r"[1-9]\d*(KB|MB|GB|TB)", text.upper()) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500MB or 5GB")
    return text.upper()


def _rate(text: str) -> float:
    """Parse an argument: bits per second, such as 400Gb."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([GMT])b(?:it)?(?:/s|ps)?\s*", text)
    value = float(match[1]) * {"M": 1e6, "G": 1e9, "T": 1e12}[match[2]] if match else 0.0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not a rate, such as 400Gb")
    return value


TYPES: Mapping[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "path": Path,
    "positive": positive_int,
    "count": count,
    "size": size,
    "shard_size": _shard_size,
    "steps": _steps,
    "shares": _shares,
    "rate": _rate,
    "seconds": _seconds,
    "port": _port,
    "fraction": _fraction,
    "fraction_or_one": _fraction_or_one,
    "suffix": lambda text: text if text.startswith(".") else f".{text}",
    "keys": lambda text: [key for key in text.split(",") if key],
}


@functools.cache
def table() -> Mapping[str, Mapping[str, Any]]:
    """Return the arguments of each command, such as ``check`` or ``launch slurm``."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # without libyaml ten times slower
    path = Path(__file__).with_name("arguments.yaml")
    tree: Mapping[str, Mapping[str, Any]] = yaml.load(path.read_text("utf-8"), Loader=loader)
    return tree


def add_arguments(parser: Any, arguments: Mapping[str, Any]) -> None:
    """Add `arguments`, an entry of `table`, to a parser or a group of one."""
    for flags, settings in arguments.items():
        if flags.startswith("one of"):
            group = parser.add_mutually_exclusive_group(required=flags.endswith("required"))
            add_arguments(group, settings)
        else:
            options = dict(settings)
            if "type" in options:
                options["type"] = TYPES[options["type"]]
            if "{" in options.get("help", ""):
                options["help"] = options["help"].format_map(_formats())
            parser.add_argument(*flags.split(), **options)


@functools.cache
def _formats() -> Mapping[str, str]:
    """Return what texts of help in the table quote of the data formats."""
    from bigtrain.data.documents.files import COMPRESSION_SUFFIXES
    from bigtrain.data.documents.formats import DEFAULT_SUFFIXES, READERS, ROW_SUFFIXES

    return {
        "rows": ", ".join(ROW_SUFFIXES),
        "compressed": f"{', '.join(COMPRESSION_SUFFIXES[:-1])} or {COMPRESSION_SUFFIXES[-1]}",
        "tables": " and ".join(reader.format_name for reader in READERS if reader.random_access),
        "folder_suffixes": " ".join(DEFAULT_SUFFIXES),
    }
