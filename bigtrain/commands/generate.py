"""`bigtrain generate`: continue a prompt with a Hugging Face directory, or chat with it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from bigtrain.errors import ModelError
from bigtrain.system.arguments import File, Positive, Seed, non_negative, probability
from bigtrain.system.text_files import TextFileError, read_text


@dataclass(frozen=True, kw_only=True)
class GenerateArguments:
    """Command line of `bigtrain generate`."""

    model: str
    """Hugging Face directory or Hub name"""
    prompt: str | None = None
    """text to continue; with --chat the first message of the user"""
    chat: bool = False
    """chat with the tokenizer's chat template: each line of standard input is a message (or
    --prompt is the only one), and the answer is streamed"""
    messages: File | None = None
    """with --chat: a JSON list of messages to begin with; if the last one is the user's, only
    answer it"""
    max_new_tokens: Positive = 128
    """maximum new tokens, or fewer where the model's positions end (default: 128)"""
    temperature: Annotated[float, non_negative] = 0.8
    """0 always selects the most likely token (default: 0.8)"""
    top_p: Annotated[float, probability] = 0.95
    """nucleus to sample from (default: 0.95)"""
    seed: Seed = 0
    """seed of the sampling (default: 0)"""
    compare_with: str | None = None
    """address of an OpenAI-compatible server of the model (vLLM, SGLang, llama.cpp): compare its
    log-probabilities of the prompt and of its most likely continuation with those of --model"""
    served_model: str | None = None
    """with --compare-with: name of the model there, if the server has several"""


def run(args: GenerateArguments) -> int:
    """Print the prompt and its continuation, or a conversation."""
    from bigtrain.python_api.results import generate

    if args.messages is not None and not args.chat:
        raise ModelError("--messages is for a conversation -> add --chat")
    if args.compare_with is not None:
        return _compare(args)
    if args.served_model is not None:
        raise ModelError("--served-model names a model of a server -> add --compare-with URL")
    # A conversation, in which each line of the user is answered, or one continuation.
    sampling: dict[str, Any] = {
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "seed": args.seed,
    }
    if args.chat:
        from bigtrain.python_api.results import open_conversation

        messages = [] if args.messages is None else _read_messages(args.messages)
        conversation = open_conversation(args.model, **sampling)
        if messages and messages[-1]["role"] == "user" and args.prompt is None:
            _answer(conversation, messages)
            return 0
        for line in _user_messages(args.prompt):
            messages.append({"role": "user", "content": line})
            _answer(conversation, messages)
        return 0
    if args.prompt is None:
        raise ModelError("--prompt is missing -> text to continue, or --chat")
    print(generate(args.model, args.prompt, **sampling))
    return 0


def _compare(args: GenerateArguments) -> int:
    """Print the differences of a server's log-probabilities from the model's. Raises ModelError if
    the server has other weights."""
    from bigtrain.models.served import compare_with_server

    if args.chat or args.prompt is None:
        raise ModelError("--compare-with: compares a text -> --prompt TEXT, without --chat")
    assert args.compare_with is not None
    comparison = compare_with_server(
        args.model,
        args.compare_with,
        args.prompt,
        max_new_tokens=args.max_new_tokens,
        served_model=args.served_model,
    )
    print("\n".join(comparison.lines()))
    if not comparison.is_same:
        raise ModelError(
            f"--compare-with {args.compare_with}: serves another model than {args.model} -> "
            "adapters that it did not load, another base, or weights in less than 16 bits"
        )
    print("the server has the weights of the export")
    return 0


def _answer(conversation: Any, messages: list[dict[str, Any]]) -> None:
    """Print the model's answer to `messages` as it is generated, and append it."""
    answer = conversation.answer(messages, lambda text: print(text, end="", flush=True))
    print(flush=True)
    messages.append({"role": "assistant", "content": answer})


def _user_messages(prompt: str | None) -> Iterator[str]:
    """Yield the user's messages: one message, or the lines of standard input until its end."""
    if prompt is not None:
        yield prompt
        return
    is_interactive = sys.stdin.isatty()
    while True:
        if is_interactive:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def _read_messages(path: Path) -> list[dict[str, Any]]:
    """Return the messages in a JSON file. Raises ModelError."""
    try:
        messages = json.loads(read_text(path))
    except TextFileError as error:
        raise ModelError(f"--messages {path}: {error}") from error
    except ValueError as error:
        raise ModelError(f"--messages {path}: cannot be read: {error}") from error
    is_valid = isinstance(messages, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
    )
    if not is_valid:
        raise ModelError(f"--messages {path}: not a JSON list of messages with role and content")
    return list(messages)
