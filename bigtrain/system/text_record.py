"""Record of how training texts begin and end, as a file in a tokenizer's directory.

A run writes it from its data's manifests, and an export includes it: so `bigtrain generate` begins
a prompt like the training texts, and stops where they stop.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bigtrain.errors import DataError

RECORD_NAME = "bigtrain_text.json"


@dataclass(frozen=True)
class TextRecord:
    """Token ids that begin every text, end a document, and stop generation: the ends of documents
    and of answers, after the stop tokens of the base that the run trained."""

    beginning_ids: tuple[int, ...]
    end_of_document_id: int
    stop_ids: tuple[int, ...]

    def begin(self, ids: Sequence[int]) -> list[int]:
        """Return `ids` with the tokens that texts begin with, which are added if they lack."""
        beginning = [*self.beginning_ids]
        has_beginning = [*ids[: len(beginning)]] == beginning
        return [*ids] if has_beginning else [*beginning, *ids]

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
        beginning, stops = tree["beginning_ids"], tree["stop_ids"]
        ids = [int(number) for number in (*beginning, tree["end_of_document_id"], *stops)]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"{path} is corrupt: {type(error).__name__}: {error} -> remove it; texts then begin as "
            "the tokenizer begins them"
        ) from error
    count = len(beginning)
    return TextRecord(tuple(ids[:count]), ids[count], tuple(ids[count + 1 :]))
