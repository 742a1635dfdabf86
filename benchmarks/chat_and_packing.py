"""Cost of conversations and packing.

chat      CPU seconds from messages to tokens and mask for one conversation: transformers'
          ``apply_chat_template(return_assistant_tokens_mask=True)``, one after another, and
          `bigtrain.data.chat.encoder`, of a template with ``{% generation %}`` marks and of one
          without. Both make the same of the same conversations (compared first) in turns, in one
          process.
packing   CPU microseconds for each document of a packing plan, and the share of padding, for
          documents of log-normal lengths; next to the padding of next-fit, which fills one sample
          after another.

Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

os.environ.setdefault("RAYON_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np

from bigtrain.data.chat.encoder import ChatEncoder
from bigtrain.data.documents.conversations import conversation_bytes
from bigtrain.data.samples.best_fit import BLOCK_PIECES, best_fit_decreasing
from bigtrain.data.tokenizers.equivalence import choose_encoder
from bigtrain.data.tokenizers.tokenizer import Tokenizer
from bigtrain.data.tokenizers.training import train_tokenizer

HEADER = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
BODY = "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}"
BODY += "{% endgeneration %}{{ '\n' }}{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}"
FOOTER = "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
MARKED = HEADER + BODY + FOOTER
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def conversations(count: int) -> list[list[dict[str, str]]]:
    """Return conversations of two to eight turns of some lines of Python's standard library."""
    chooser = random.Random(0)
    text = Path(json.__file__).with_name("decoder.py").read_text() + Path(os.__file__).read_text()
    lines = [line for line in text.splitlines() if line.strip()]
    chats = []
    for _ in range(count):
        messages = []
        for turn in range(chooser.choice((2, 2, 4, 8))):
            first = chooser.randrange(len(lines) - 40)
            content = "\n".join(lines[first : first + chooser.randint(1, 24)])
            messages.append({"role": ("user", "assistant")[turn % 2], "content": content})
        chats.append(messages)
    return chats


def chat_tokenizer(chats: list[list[dict[str, str]]], template: str) -> Tokenizer:
    """Return a tokenizer of 4,096 tokens trained on the conversations, with `template`."""
    from dataclasses import replace

    texts = [message["content"] for messages in chats for message in messages]
    tokenizer = train_tokenizer([texts], 4096)
    tokenizer.huggingface.add_special_tokens(
        {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    )
    tokenizer.huggingface.chat_template = template
    return replace(tokenizer, name="benchmark")


def chat_figures(num_chats: int, rounds: int) -> dict[str, Any]:
    """Microseconds for each conversation, and the ratios, of both templates."""
    chats = conversations(num_chats)
    contents = [conversation_bytes(messages) for messages in chats]
    result: dict[str, Any] = {}
    for name, template in (("marked", MARKED), ("unmarked", UNMARKED)):
        tokenizer = chat_tokenizer(chats, template)
        encoders = choose_encoder(tokenizer.encoder(True, ends=False), "auto")
        encoder = ChatEncoder(
            encoders.current, encoders.reference, tokenizer.chat_template(), trusted=False
        )
        theirs = chat_tokenizer(chats, MARKED).huggingface
        expected = [
            theirs.apply_chat_template(m, return_dict=True, return_assistant_tokens_mask=True)
            for m in chats
        ]
        own = encoder.encode(contents)
        assert own.tokens.tolist() == [t for e in expected for t in e["input_ids"]]
        assert own.mask.tolist() == [bool(b) for e in expected for b in e["assistant_masks"]]
        seconds: dict[str, list[float]] = {"transformers": [], "bigtrain": []}
        for _ in range(rounds):
            begun = time.process_time()
            for messages in chats:
                theirs.apply_chat_template(
                    messages, return_dict=True, return_assistant_tokens_mask=True
                )
            seconds["transformers"].append(time.process_time() - begun)
            begun = time.process_time()
            encoder.encode(contents)
            seconds["bigtrain"].append(time.process_time() - begun)
        ratios = [a / b for a, b in zip(seconds["transformers"], seconds["bigtrain"], strict=True)]
        result[name] = {
            "tokens_per_conversation": round(len(own.tokens) / num_chats),
            "encoder": encoders.current.engine(),
            **{
                f"{who}_cpu_us_per_conversation": round(statistics.median(s) / num_chats * 1e6, 1)
                for who, s in seconds.items()
            },
            "times_faster": round(statistics.median(ratios), 2),
        }
    return result


def packing_figures(num_documents: int, rounds: int) -> dict[str, Any]:
    """Measure packing for several sequence lengths."""
    generator = np.random.default_rng(0)
    drawn = np.exp(generator.normal(6.3, 1.2, num_documents)).astype(np.int64)
    result = {}
    for sequence_length in (2048, 4096, 32768):
        room = sequence_length + 1
        lengths = np.clip(drawn, 2, room)
        seconds = []
        for _ in range(rounds):
            begun = time.process_time()
            _, num_packs = best_fit_decreasing(lengths, room)
            seconds.append(time.process_time() - begun)
        result[str(sequence_length)] = {
            "cpu_us_per_document": round(statistics.median(seconds) / num_documents * 1e6, 3),
            "padding_fraction": float(f"{1 - lengths.sum() / (num_packs * room):.2e}"),
            "padding_fraction_of_next_fit": round(1 - lengths.sum() / (next_fit(lengths, room)), 3),
        }
    return result


def next_fit(lengths: np.ndarray[Any, np.dtype[np.int64]], room: int) -> int:
    """Places of all samples if a document begins a new one whenever it does not fit."""
    num_packs, left = 0, 0
    for length in lengths.tolist():
        if length > left:
            num_packs, left = num_packs + 1, room
        left -= length
    return num_packs * room


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Cost of conversations and packing.")
    parser.add_argument("--chats", type=int, default=2000, help="conversations")
    parser.add_argument("--documents", type=int, default=BLOCK_PIECES, help="to be packed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="prove that it runs, measure nothing")
    args = parser.parse_args(argv)
    if args.tiny:
        args.chats, args.documents, args.rounds = 5, 500, 1
    result = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "chat": chat_figures(args.chats, args.rounds),
        "packing": packing_figures(args.documents, args.rounds),
    }
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
