"""The tokens with which a chat template ends an answer, so that generation stops there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer

from bigtrain.models.configuration import GENERATION_CONFIG

_ANSWER = "\U0010fffb"
_MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER}]


def end_of_turn_ids(tokenizer: Any) -> list[int]:
    """Ids of the first special token that the tokenizer's chat template writes after an answer;
    empty without a template, or if it writes none."""
    if not tokenizer.chat_template:
        return []
    try:
        text = tokenizer.apply_chat_template(_MESSAGES, tokenize=False)
    except (TemplateError, ValueError, TypeError, KeyError):
        return []  # a template that does not accept these messages
    ending = text.rpartition(_ANSWER)[2] if _ANSWER in text else ""
    added = tokenizer.added_tokens_decoder.items()
    special = {*tokenizer.all_special_ids, *(number for number, token in added if token.special)}
    for token_id in tokenizer(ending, add_special_tokens=False).input_ids:
        if token_id in special:
            return [int(token_id)]
    return []


def stop_at_end_of_turn(directory: Path) -> list[str]:
    """Make generation from a Hugging Face directory also stop at the end of an answer.

    End tokens that the settings already name stay, and come first. Returns a note if any is added.
    """
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    endings = end_of_turn_ids(tokenizer)
    path = directory / GENERATION_CONFIG
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    known = settings.get("eos_token_id")
    listed = [known] if isinstance(known, int) else list(known or [])
    missing = [token_id for token_id in endings if token_id not in listed]
    if missing:
        settings["eos_token_id"] = [*listed, *missing]
        path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        return [f"{GENERATION_CONFIG}: eos_token_id also {missing}, which ends an answer in a chat"]
    return []
