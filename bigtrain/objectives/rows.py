"""Record of the rows of data that an objective of answers or labels reads. Pure.

Data preparation, inspection and loading ask it; functions and classes with numpy are named as
``module:name``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Rows = Literal["preference", "kto", "classification"]
"""Names of the rows, of ``tokenize --format`` and of ``rows`` in the manifest."""
AlpacaFormat = Literal[
    "alpaca-instruct",
    "alpaca-chat",
    "alpaca-chatml",
    "alpaca-phi",
    "alpaca-instruct-bare",
    "alpaca-chat-bare",
    "alpaca-instruct-system",
    "alpaca-chat-system",
    "open-orca",
    "open-orca-chatml",
]
"""Formats of instructions whose prompts are plain text, as Axolotl writes them."""
RowFormat = Literal[
    "messages", "sharegpt", "alpaca", "prompt-completion", "tokens", AlpacaFormat, Rows
]
"""Formats of rows that are more than plain text."""


class Refusal(NamedTuple):
    """Rule that refuses a dataset, and the fix."""

    rule: str
    fix: str


@dataclass(frozen=True)
class AnswerRows:
    """Rows of data whose documents are separate samples, not parts of a stream of tokens.

    documents: names of the documents that a row becomes in the shards. rows_per_sample: rows of
    the model's input for a sample. is_labeled: whether a document has a label, a byte of a
    `.labels`; label_names: of the labels, unless ``tokenize --labels`` names them. has_mismatched:
    whether the second row of a sample is a mismatched answer, whose scores are stored separately.

    keys, identifying, noun, is_detected: as in `bigtrain.data.documents.row_format.ChatFormat`.
    parse: function of the values of `keys` and of roles that returns the document of a row.
    encode: function of a chat encoder, documents, checks and names of labels that returns
    `bigtrain.data.chat.preferences.EncodedRows`. samples: class of the samples of a split.

    padded_unit: what is padded to a row of the model's input. learned: what ``--learn last`` would
    select from. summary, document: `bigtrain inspect` on a dataset and on a document. identity:
    name in the identity of training data. missing: refusal of data without these rows, which
    objective {} reads; for_next_token: refusal of data with these rows in a run of next_token.
    """

    name: Rows
    documents: tuple[str, ...]
    keys: tuple[str, ...]
    identifying: frozenset[str]
    noun: str
    parse: str
    encode: str
    samples: str
    padded_unit: str
    learned: str
    summary: str
    document: str
    identity: str
    missing: Refusal
    for_next_token: Refusal
    rows_per_sample: int = 1
    is_labeled: bool = False
    label_names: tuple[str, ...] = ()
    has_mismatched: bool = False
    is_detected: bool = True

    @property
    def has_classes(self) -> bool:
        """Whether a label is a class that ``tokenize --labels`` names."""
        return self.is_labeled and not self.label_names
