"""Chat templates as they are shipped, tokenizers for them, and conversations."""

from __future__ import annotations

import json
import pickle
import re
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, normalizers

from bigtrain.data.tokenizers.training import train_tokenizer

CHATML = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Llama 3: trimmed content, bos token.
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

# Zephyr: roles as letters of control tokens, the end without them in the block.
ZEPHYR = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{{ eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)

# Qwen 3, shortened: tools, tool calls, and thoughts in no turn but those after the last question.
QWEN3 = (
    "{% if tools %}{{ '<|im_start|>system\n# Tools\n' }}"
    "{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% set ns = namespace(last=0) %}"
    "{% for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}"
    "{% set parts = (message.content or '').split('</think>') %}"
    "{% if loop.index0 > ns.last %}"
    "{{ '<think>\n' + parts[0].split('<think>')[-1].strip() + '\n</think>\n\n' "
    "if parts | length > 1 else ('<think>\n\n</think>\n\n' if loop.last else '') }}{% endif %}"
    "{{ parts[-1].lstrip('\n') }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '\n<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "zephyr": ZEPHYR, "qwen3": QWEN3}

SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|assistant|>",
    "<|user|>",
    "<|system|>",
    "<|end|>",
)

TEXT = [
    "The quick brown fox jumps over the lazy dog. What is the capital of France? It is Paris.",
    "user assistant system tool: def f(x):\n    return x ** 2\n\n# naïve café 東京 🙂",
    '{"name": "get_weather", "arguments": {"city": "Paris"}} <|im <| |> > < im_end',
] * 20


def unmarked(template: str) -> str:
    """Return the template as most are shipped: without marks of what the assistant wrote."""
    return re.sub(r"\{% (end)?generation %\}", "", template)


@cache
def _trained() -> bytes:
    return pickle.dumps(train_tokenizer([TEXT], 400).huggingface)


def trained_tokenizer() -> Any:
    """Return a new byte-level tokenizer of transformers with 400 tokens of `TEXT`."""
    return pickle.loads(_trained())


def chat_tokenizer(template: str | dict[str, str] | None, normalizer: str | None = None) -> Any:
    """Return a small byte-level tokenizer of transformers with the tokens of all templates here."""
    wrapped = trained_tokenizer()
    wrapped.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    wrapped.add_tokens(
        [AddedToken(t, special=False, normalized=False) for t in ("<think>", "</think>")]
    )
    wrapped.bos_token = "<|begin_of_text|>"
    if normalizer is not None:
        wrapped.backend_tokenizer.normalizer = getattr(normalizers, normalizer)()
    wrapped.chat_template = template
    return wrapped


def save_chat_tokenizer(directory: Path, template: str | None = CHATML) -> Path:
    """Return the directory of such a tokenizer."""
    chat_tokenizer(template).save_pretrained(str(directory))
    return directory


def turns(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    """Return a conversation whose user begins."""
    first = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    return first + [
        {"role": roles[number % 2], "content": content} for number, content in enumerate(contents)
    ]


def write_readme_chats(folder: Path) -> None:
    """Write the tokenizer and the conversations that the README's page on chat data trains on."""
    tokenizer = chat_tokenizer(unmarked(CHATML))
    # The recipe's model has 4096 tokens.
    tokenizer.add_tokens([f"<extra {number}>" for number in range(4096 - len(tokenizer))])
    tokenizer.save_pretrained(str(folder / "chat-tokenizer"))
    chats = [
        turns(*(f"{'word ' * (n % 9)}{n}, {turn}?" for turn in range(2 + 2 * (n % 3))))
        for n in range(800)
    ]
    rows = "".join(json.dumps({"messages": messages}) + "\n" for messages in chats)
    (folder / "chats.jsonl").write_text(rows)
