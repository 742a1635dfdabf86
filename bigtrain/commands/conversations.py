"""Arguments of `bigtrain tokenize` on the format of rows: kinds of conversations, or text."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bigtrain.commands.arguments import count
from bigtrain.errors import DataError


def add_conversation_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `conversations_of` converts, and those that need conversations."""
    parser.add_argument(
        "--chat-key",
        metavar="KEY",
        help="instead of --text-key: the key of a conversation, a list of messages with "
        "role and content (its tools are in the key `tools`); rendered by the tokenizer's chat "
        "template, with loss on the assistant's tokens only",
    )
    parser.add_argument(
        "--format",
        choices=("auto", "text", "messages", "sharegpt", "alpaca", "prompt-completion"),
        default="auto",
        help="format of a row; auto detects it from the keys of the first row, and prints it, if "
        "neither --text-key nor --chat-key is given; for a named pipe it is text (default: auto)",
    )
    parser.add_argument(
        "--key",
        action="append",
        default=[],
        metavar="NAME=KEY",
        help="name in the data of a key of --format, such as instruction=question, or of a key of "
        "its turns: from=speaker, value=said (sharegpt), role=author, content=text (messages)",
    )
    parser.add_argument(
        "--role",
        action="append",
        default=[],
        metavar="NAME=ROLE",
        help="meaning of a role name in the data, such as customer=user; may be repeated "
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
    parser.add_argument(
        "--max-unrendered",
        type=count,
        default=0,
        metavar="N",
        help="parts of conversations (content of a message, tool call, tool definition, reasoning) "
        "that the chat template may drop; reasoning that it drops of earlier turns by design is "
        "counted, and allowed in any case (default: 0)",
    )


def conversations_of(args: argparse.Namespace) -> dict[str, Any]:
    """Convert the arguments of `add_conversation_arguments` to parameters of
    `bigtrain.python_api.tokenizing.build_tokens`. Raises DataError for incompatible
    arguments."""
    name = args.format
    keys = dict(_pair(pair, "--key", "instruction=question") for pair in args.key)
    if args.chat_key is not None:
        if args.text_key:
            raise DataError(f"--text-key and --chat-key {args.chat_key} exclude each other")
        if name not in ("auto", "messages"):
            raise DataError(f"--chat-key is of --format messages, and --format is {name} -> --key")
        name, keys = "messages", {"messages": args.chat_key, **keys}
    return {
        "format": name,
        "keys": keys,
        "roles": dict(_pair(pair, "--role", "customer=user") for pair in args.role),
        "learn": args.learn,
        "chat_template": args.chat_template,
    }


def _pair(text: str, flag: str, example: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        what = "NAME=KEY" if flag == "--key" else "NAME=ROLE"
        raise DataError(f"{flag} {text}: not {what}, such as {example}")
    return name, value
