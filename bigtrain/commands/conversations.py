"""Arguments of `bigtrain tokenize` that say what rows hold: conversations, and which, or text."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigtrain.errors import DataError

if TYPE_CHECKING:
    from bigtrain.data.documents.parts import ReadOptions


@dataclass(frozen=True)
class RowFormat:
    """A format of conversations, the keys that a row has for it, and its role names, as
    ``NAME=ROLE``."""

    name: Any  # of OptionsRecord.chat_format
    keys: tuple[str, ...]
    roles: tuple[str, ...]


def add_conversation_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that `row_format_of` understands, and those that need conversations."""
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
        "--role",
        action="append",
        default=[],
        metavar="NAME=ROLE",
        help="what a name of a role in the data means, such as customer=user; may be repeated "
        "(those of ShareGPT, human, gpt, observation, ..., are known)",
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


def row_format_of(args: argparse.Namespace, reading: ReadOptions) -> RowFormat | None:
    """The format of the conversations in the input; None for text. Raises DataError for arguments
    that do not go together, and for those of conversations where the input is text."""
    if args.chat_key is not None and args.text_key:
        raise DataError(f"--text-key and --chat-key {args.chat_key} exclude each other")
    found = _conversations(args, reading)
    if found is not None:
        return found
    if args.chat_template is not None:
        raise DataError("--chat-template is for conversations -> name their key: --chat-key")
    if args.learn != "all":
        raise DataError("--learn last is for conversations -> --format messages, or leave it out")
    if args.role:
        raise DataError("--role names roles of conversations -> --format sharegpt, or leave it out")
    return None


def _conversations(args: argparse.Namespace, reading: ReadOptions) -> RowFormat | None:
    from bigtrain.data.documents.chat_formats import FORMATS, nearest
    from bigtrain.data.documents.first_row import keys_of_first_row

    names = dict(_pair(pair, "--key", "instruction=question") for pair in args.key)
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
    if name == "messages" and keys[1:] == known[1:]:
        keys = keys[:1]  # the key `tools` is implied: it is not recorded, as in earlier versions
    return RowFormat(name, keys, _roles(args.role, name))


def _roles(pairs: list[str], name: str) -> tuple[str, ...]:
    if pairs and name == "alpaca":
        raise DataError("--role: rows of --format alpaca have no roles -> leave it out")
    roles = dict(_pair(pair, "--role", "customer=user") for pair in pairs)
    return tuple(f"{said}={role}" for said, role in sorted(roles.items()))


def _pair(text: str, flag: str, example: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        what = "NAME=KEY" if flag == "--key" else "NAME=ROLE"
        raise DataError(f"{flag} {text}: not {what}, such as {example}")
    return name, value
