"""Small files of a base that would make its export another model, or none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bigtrain.models.configuration import GENERATION_CONFIG

TOKEN_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "tekken.json",
    "sentencepiece.model", "sentencepiece.bpe.model",
)  # fmt: skip
"""Files of a model's directory that decide which tokens a text has."""
TOKENIZER_FILES = (*TOKEN_FILES, "chat_template.jinja", "chat_template.json")
"""Files of a model's directory that only its tokenizer reads."""

ADAPTER_CONFIG = "adapter_config.json"


def unusable_files(directory: Path) -> Iterator[tuple[str, str]]:
    """Yield each fault of the files in a base's `directory`, and how to correct it."""
    if (directory / ADAPTER_CONFIG).exists():
        yield (
            f"{ADAPTER_CONFIG} is in the same directory: transformers loads the adapter's own base "
            "with the adapter from such a directory, not these weights",
            f"move {ADAPTER_CONFIG} and the adapter's weights out of it; to train the merged "
            "model, merge them first (peft: merge_and_unload, save_pretrained)",
        )
    path = directory / GENERATION_CONFIG
    if path.is_file() and (fault := _generation_fault(path)) is not None:
        yield f"{GENERATION_CONFIG}: {fault}", f"correct {path}, or remove it"


def _generation_fault(path: Path) -> str | None:
    try:
        settings: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"cannot be read as JSON: {error}"
    if not isinstance(settings, dict):
        return "must be a JSON object"
    ends = settings.get("eos_token_id")
    listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if any(isinstance(one, bool) or not isinstance(one, int) for one in listed):
        return f"eos_token_id = {ends!r} must be the id of a token, or a list of ids"
    return None
