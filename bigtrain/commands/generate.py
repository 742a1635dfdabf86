"""`bigtrain generate`: continue a prompt with a Hugging Face directory, or chat with it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bigtrain.errors import ModelError


def run(args: argparse.Namespace) -> int:
    """Print the prompt and its continuation, or a conversation."""
    from bigtrain.python_api.results import generate

    if args.messages is not None and not args.chat:
        raise ModelError("--messages is for a conversation -> add --chat")
    how: dict[str, Any] = {
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "seed": args.seed,
    }
    if args.chat:
        from bigtrain.python_api.results import open_conversation

        messages = [] if args.messages is None else _read_messages(args.messages)
        talk = open_conversation(args.model, **how)
        if messages and messages[-1]["role"] == "user" and args.prompt is None:
            _answer(talk, messages)
            return 0
        for line in _user_messages(args.prompt):
            messages.append({"role": "user", "content": line})
            _answer(talk, messages)
        return 0
    if args.prompt is None:
        raise ModelError("--prompt is missing -> text to continue, or --chat")
    print(generate(args.model, args.prompt, **how))
    return 0


def _answer(talk: Any, messages: list[dict[str, Any]]) -> None:
    answer = talk.answer(messages, lambda text: print(text, end="", flush=True))
    print(flush=True)
    messages.append({"role": "assistant", "content": answer})


def _user_messages(prompt: str | None) -> Iterator[str]:
    """Yield the user's messages: one message, or the lines of standard input until its end."""
    if prompt is not None:
        yield prompt
        return
    asks = sys.stdin.isatty()
    while True:
        if asks:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def _read_messages(path: Path) -> list[dict[str, Any]]:
    try:
        messages = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"--messages {path}: cannot be read: {error}") from error
    right = isinstance(messages, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
    )
    if not right:
        raise ModelError(f"--messages {path}: not a JSON list of messages with role and content")
    return list(messages)
