"""The tokens with which a chat template ends an answer, so that generation stops there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer

from bigtrain.models.configuration import GENERATION_CONFIG
from bigtrain.system.text_record import read_record

_ANSWER = "\U0010fffb"
_QUESTION = {"role": "user", "content": "a"}
_REPLY = {"role": "assistant", "content": _ANSWER}


def end_of_turn_ids(tokenizer: Any) -> list[int]:
    """Ids of the first special token that the tokenizer's chat template writes after an answer, or
    by which it begins the next message where nothing ends an answer; empty without a template, or
    if it writes none."""
    if not tokenizer.chat_template:
        return []
    added = tokenizer.added_tokens_decoder.items()
    special = {*tokenizer.all_special_ids, *(number for number, token in added if token.special)}
    for messages in ([_QUESTION, _REPLY], [_QUESTION, _REPLY, _QUESTION]):
        ending = _after_answer(tokenizer, messages)
        for token_id in tokenizer(ending, add_special_tokens=False).input_ids:
            if token_id in special:
                return [int(token_id)]
        if ending.strip():
            break  # text that is no token ends an answer
    return []


def _after_answer(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    """What the chat template writes after the answer; empty if it does not accept `messages`."""
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except (TemplateError, ValueError, TypeError, KeyError):
        return ""
    return text.rpartition(_ANSWER)[2] if _ANSWER in text else ""


def stop_at_end_of_turn(directory: Path) -> list[str]:
    """Make generation from a Hugging Face directory also stop at the end of an answer: as learned,
    by the record of the training data, and as the chat template writes it.

    End tokens that the settings already name stay, and come first. Returns a note if any is added.
    """
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    record = read_record(directory)
    endings = [*(() if record is None else record.answer_end_ids), *end_of_turn_ids(tokenizer)]
    path = directory / GENERATION_CONFIG
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    known = settings.get("eos_token_id")
    listed = [known] if isinstance(known, int) else list(known or [])
    missing = [token_id for token_id in dict.fromkeys(endings) if token_id not in listed]
    if missing:
        settings["eos_token_id"] = [*listed, *missing]
        path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        return [f"{GENERATION_CONFIG}: eos_token_id also {missing}, which ends an answer in a chat"]
    return []
