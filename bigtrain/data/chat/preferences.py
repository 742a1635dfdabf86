"""Encoder of rows of preferences and classes.

A pair becomes two documents, chosen then rejected; an answer, or a sample of a class, becomes one
document with a label. A row is used or rejected with all its documents.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from bigtrain.data.chat.encoder import ChatEncoder, EncodedChats
from bigtrain.data.documents.exact_json import dumps, read_document
from bigtrain.data.documents.preferences import SIDES
from bigtrain.data.documents.reader import TEMPLATE_FAULT
from bigtrain.data.shards.format import Mask
from bigtrain.data.tokenizers.chat_template import ConversationError
from bigtrain.data.tokenizers.equivalence import Checks
from bigtrain.objectives.rows import Rows
from bigtrain.objectives.section import ROWS

Documents = Sequence[Mapping[str, Any]]
"""Documents of rows, as `bigtrain.data.documents.preferences` writes them."""
SAME = "chosen and rejected become the same tokens"


@dataclass(frozen=True)
class EncodedRows:
    """Rows as documents. `chats`: documents of the rows; bad rows have a problem and lengths of 0.
    `labels`: uint8 [rows], 1 for a desirable answer, or numbers of classes; None without labels.
    `dropped`: numbers of the rows that a limit drops, which have lengths of 0 and no problem."""

    chats: EncodedChats
    labels: npt.NDArray[np.uint8] | None = None
    dropped: tuple[int, ...] = ()


def encode_rows(
    chat: ChatEncoder,
    contents: Sequence[bytes],
    checks: Checks | None,
    rows: Rows | None,
    names: Sequence[str] = (),
) -> EncodedRows:
    """Encode rows given as `RowDocument.document`; the numbers in `problems` are of rows. `names`:
    of the labels of classes. Raises as `ChatEncoder.encode`."""
    if rows is None:
        return EncodedRows(chat.encode(contents, checks))
    documents = [read_document(content) for content in contents]
    encoded: EncodedRows = pkgutil.resolve_name(ROWS[rows].encode)(chat, documents, checks, names)
    return encoded


def encode_pairs(
    chat: ChatEncoder, pairs: Documents, checks: Checks | None, names: Sequence[str]
) -> EncodedRows:
    """Encode the chosen and the rejected document of each pair."""
    halves = [dumps(pair[side]) for pair in pairs for side in SIDES]
    are_text = ["prompt" in pair[SIDES[0]] for pair in pairs]
    return EncodedRows(_complete_pairs(chat.encode(halves, checks, group=2), are_text))


def encode_labeled(
    chat: ChatEncoder, rows: Documents, checks: Checks | None, names: Sequence[str]
) -> EncodedRows:
    """Encode answers, with their labels."""
    answers = [dumps(row["answer"]) for row in rows]
    labels = np.fromiter((row["label"] for row in rows), np.uint8, len(rows))
    return EncodedRows(chat.encode(answers, checks), labels)


def encode_classified(
    chat: ChatEncoder, rows: Documents, checks: Checks | None, names: Sequence[str]
) -> EncodedRows:
    """Encode samples, with class numbers; a sample of an unknown class is bad."""
    samples = [dumps(row["sample"]) for row in rows]
    encoded = chat.encode(samples, checks, is_complete=True)
    problems = dict(encoded.problems)
    class_numbers = np.zeros(len(rows), np.uint8)
    for number, row in enumerate(rows):
        try:
            class_numbers[number] = _class_number(row["label"], names)
        except ConversationError as error:
            problems.setdefault(number, str(error))
    is_usable = np.ones(len(rows), np.bool_)
    is_usable[list(problems)] = False
    return EncodedRows(_with_documents(encoded, is_usable, problems), class_numbers)


def _class_number(label: int | str, names: Sequence[str]) -> int:
    """Return the number of a class by its name, or by the number, also as text. Raise
    ConversationError for an unknown class, and for a number if names are numbers of other
    classes."""
    if isinstance(label, str) and label in names:
        return names.index(label)
    is_number = isinstance(label, int) or (label.isascii() and label.isdecimal())
    positions = [str(position) for position in range(len(names))]
    names_are_other_numbers = any(map(_is_number, names)) and list(names) != positions
    if is_number and names_are_other_numbers:
        raise ConversationError(
            f"its label is {label!r}, a name or a position of --labels {' '.join(names)}? -> text "
            "that is a name, or --labels that are not numbers, in the order of the labels 0 to "
            f"{len(names) - 1}"
        )
    if is_number and str(label) in positions:
        return int(label)
    choices = f"0 to {len(names) - 1} or one of {', '.join(names)}"
    raise ConversationError(f"its label is {label!r}, which is not {choices}")


def _is_number(name: str) -> bool:
    with suppress(ValueError):
        float(name)
        return True
    return False


def without_long_prompts(
    encoded: EncodedRows, documents_per_row: int, max_prompt_tokens: int
) -> EncodedRows:
    """Return `encoded` without rows with a document that has more than `max_prompt_tokens` tokens
    before the first target."""
    lengths = encoded.chats.lengths
    begins = np.cumsum(lengths) - lengths
    target_positions = np.append(np.flatnonzero(encoded.chats.mask), len(encoded.chats.mask))
    first_targets = target_positions[np.searchsorted(target_positions, begins)]
    # The first target after the begin of a document without targets is in a later document.
    prompt_lengths = np.minimum(first_targets - begins, lengths)
    has_long_prompt = (prompt_lengths > max_prompt_tokens).reshape(-1, documents_per_row).any(1)
    rows = np.flatnonzero(has_long_prompt)
    is_short = ~np.repeat(has_long_prompt, documents_per_row)
    chats = _with_documents(encoded.chats, is_short, dict(encoded.chats.problems))
    return replace(encoded, chats=chats, dropped=tuple(rows.tolist()))


def _with_documents(
    encoded: EncodedChats,
    keep_document: Mask,
    problems: Mapping[int, str],
    mask: Mask | None = None,
) -> EncodedChats:
    """Return `encoded` without the documents for which `keep_document` is false, with `problems` of
    rows, and with `mask` (of all documents) instead of its mask."""
    keep_token = np.repeat(keep_document, encoded.lengths)
    return replace(
        encoded,
        tokens=encoded.tokens[keep_token],
        mask=(encoded.mask if mask is None else mask)[keep_token],
        lengths=encoded.lengths * keep_document,
        weights=None if encoded.weights is None else encoded.weights[keep_token],
        problems=tuple(sorted(problems.items())),
    )


def _complete_pairs(encoded: EncodedChats, are_text: Sequence[bool]) -> EncodedChats:
    """Return `encoded` with the problems of pairs, and without both halves of a bad pair. Plain
    text is learned from a common position on in both halves, as in TRL: if a token of the chosen
    half contains the last letters of the prompt and the first letters of the answer, the token at
    this position is learned in the rejected half, too."""
    problems: dict[int, str] = {}
    for number, reason in encoded.problems:
        # The start of the text identifies a fault of the template, so no side is written before it.
        if not reason.startswith(TEMPLATE_FAULT):
            reason = f"{SIDES[number % 2]}: {reason}"
        problems.setdefault(number // 2, reason)

    # Equal halves are a problem; halves of plain text are learned from a common position.
    ends = np.cumsum(encoded.lengths)
    begins = ends - encoded.lengths
    mask = encoded.mask.copy()
    for row, is_text in enumerate(are_text):
        if row in problems:
            continue
        halves = [slice(int(begins[n]), int(ends[n])) for n in (2 * row, 2 * row + 1)]
        chosen_tokens, rejected_tokens = (encoded.tokens[half] for half in halves)
        if np.array_equal(chosen_tokens, rejected_tokens):
            problems[row] = SAME
        elif is_text:
            first_learned = min(int(mask[half].argmax()) for half in halves)
            for half in halves:
                mask[half][first_learned:] = True
    keep_document = np.ones(len(encoded.lengths), np.bool_)
    for row in problems:
        keep_document[2 * row : 2 * row + 2] = False
    return _with_documents(encoded, keep_document, problems, mask)
