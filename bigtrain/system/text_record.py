"""Record of how training texts begin and end, as a file in a tokenizer's directory.

A run writes it from its data's manifests, and an export includes it: so `bigtrain generate` begins
a prompt like the training texts, and stops an answer where they stop.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bigtrain.errors import DataError

RECORD_NAME = "bigtrain_text.json"


@dataclass(frozen=True)
class TextRecord:
    """Token ids that begin every text, end a document, and end answers of conversations."""

    beginning_ids: tuple[int, ...]
    end_of_document_id: int
    answer_end_ids: tuple[int, ...] = ()

    def save(self, directory: Path) -> None:
        text = json.dumps(asdict(self), indent=2) + "\n"
        (directory / RECORD_NAME).write_text(text, encoding="utf-8")


def read_record(directory: Path) -> TextRecord | None:
    """Return the record in `directory`; None if there is none. Raise DataError for invalid
    content."""
    path = directory / RECORD_NAME
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    try:
        tree: dict[str, Any] = json.loads(content)
        beginning, ends = tree["beginning_ids"], tree["answer_end_ids"]
        ids = [int(number) for number in (*beginning, tree["end_of_document_id"], *ends)]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"{path} is corrupt: {type(error).__name__}: {error} -> remove it; texts then begin as "
            "the tokenizer begins them"
        ) from error
    count = len(beginning)
    return TextRecord(tuple(ids[:count]), ids[count], tuple(ids[count + 1 :]))
