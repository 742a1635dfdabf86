"""Arguments of `bigtrain tokenize` on the format of rows: kinds of conversations, or text."""

from __future__ import annotations

import argparse
from typing import Any

from bigtrain.errors import DataError


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
        form = "NAME=KEY" if flag == "--key" else "NAME=ROLE"
        raise DataError(f"{flag} {text}: not {form}, such as {example}")
    return name, value
