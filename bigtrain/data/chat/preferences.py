"""Encodes rows of preferences: of a pair two documents, chosen then rejected; of an answer or of
another sample one and its label. A row is used or rejected with all its documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from bigtrain.data.chat.encoder import ChatEncoder, EncodedChats
from bigtrain.data.documents.exact_json import dumps, read_document
from bigtrain.data.documents.preferences import SIDES
from bigtrain.data.documents.reader import TEMPLATE_FAULT
from bigtrain.data.shards.format import Mask
from bigtrain.data.shards.manifest import Rows
from bigtrain.data.tokenizers.equivalence import Checks

DOCUMENTS_PER_ROW: dict[Rows | None, int] = {
    None: 1,
    "preference": 2,
    "kto": 1,
    "classification": 1,
}
SAME = "chosen and rejected become the same tokens"


@dataclass(frozen=True)
class EncodedRows:
    """Rows as documents. `chats`: documents of all rows, `problems` and lengths of 0 of the bad
    ones; `labels`: uint8 [rows], 1 for a desirable answer, or numbers of classes; None without
    labels. `dropped`: rows without documents that are not bad."""

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
    trees = [read_document(content) for content in contents]
    if rows == "kto":
        answers = [dumps(tree["answer"]) for tree in trees]
        labels = np.fromiter((tree["label"] for tree in trees), np.uint8, len(trees))
        return EncodedRows(chat.encode(answers, checks), labels)
    if rows == "classification":
        samples = [dumps(tree["sample"]) for tree in trees]
        encoded = chat.encode(samples, checks, is_complete=True)
        return _with_classes(encoded, [tree["label"] for tree in trees], names)
    halves = [dumps(tree[side]) for tree in trees for side in SIDES]
    are_text = ["prompt" in tree[SIDES[0]] for tree in trees]
    return EncodedRows(_whole_pairs(chat.encode(halves, checks, group=2), are_text))


def _with_classes(
    encoded: EncodedChats, labels: Sequence[int | str], names: Sequence[str]
) -> EncodedRows:
    """Return `encoded` with the numbers of its classes, without samples of an unknown one."""
    problems = dict(encoded.problems)
    numbers = np.zeros(len(labels), np.uint8)
    for row, label in enumerate(labels):
        number, why = _number(label, names)
        if why:
            problems.setdefault(row, why)
        numbers[row] = number
    kept = np.ones(len(labels), np.bool_)
    kept[list(problems)] = False
    return EncodedRows(_of_rows(encoded, kept, problems), numbers)


def _number(label: int | str, names: Sequence[str]) -> tuple[int, str]:
    """Return the number of a class by its name, or by itself, also as text; and why it has none.
    A number has one meaning only if no name is a number, or each name is its own number."""
    if isinstance(label, str) and label in names:
        return names.index(label), ""
    is_number = isinstance(label, int) or (label.isascii() and label.isdecimal())
    are_numbers = any(map(_is_number, names)) and list(names) != [*map(str, range(len(names)))]
    if is_number and are_numbers:
        return 0, (
            f"its label is {label!r}, a name or a position of --labels {' '.join(names)}? -> text "
            "that is a name, or --labels that are not numbers, in the order of the labels 0 to "
            f"{len(names) - 1}"
        )
    if is_number and str(int(label)) == str(label) and 0 <= int(label) < len(names):
        return int(label), ""
    known = f"0 to {len(names) - 1} or one of {', '.join(names)}"
    return 0, f"its label is {label!r}, which is not {known}"


def _is_number(name: str) -> bool:
    with suppress(ValueError):
        float(name)
        return True
    return False


def without_long_prompts(
    read: EncodedRows, documents_per_row: int, max_prompt_tokens: int
) -> EncodedRows:
    """Return `read` without the rows of which a document has more than `max_prompt_tokens` tokens
    before its first target."""
    lengths = read.chats.lengths
    begins = np.cumsum(lengths) - lengths
    targets = np.append(np.flatnonzero(read.chats.mask), len(read.chats.mask))
    firsts = targets[np.searchsorted(targets, begins)]
    is_long = (np.minimum(firsts - begins, lengths) > max_prompt_tokens).reshape(
        -1, documents_per_row
    )
    rows = np.flatnonzero(is_long.any(1))
    kept = ~np.repeat(is_long.any(1), documents_per_row)
    chats = _of_rows(read.chats, kept, dict(read.chats.problems))
    return replace(read, chats=chats, dropped=tuple(rows.tolist()))


def _of_rows(
    encoded: EncodedChats, kept: Mask, problems: Mapping[int, str], mask: Mask | None = None
) -> EncodedChats:
    """Return `encoded` without documents that are not `kept`, and with the `problems` of rows."""
    of_kept = np.repeat(kept, encoded.lengths)
    return replace(
        encoded,
        tokens=encoded.tokens[of_kept],
        mask=(encoded.mask if mask is None else mask)[of_kept],
        lengths=encoded.lengths * kept,
        weights=None if encoded.weights is None else encoded.weights[of_kept],
        problems=tuple(sorted(problems.items())),
    )


def _whole_pairs(encoded: EncodedChats, are_text: Sequence[bool]) -> EncodedChats:
    """Return `encoded` with the problems of pairs, and without the other half of a bad one. Plain
    text is learned from the same token on in both halves, as in TRL: of a prompt whose last letters
    are in a token with the first ones of one answer, that token is learned in the other, too."""
    problems: dict[int, str] = {}
    for number, why in encoded.problems:
        # A fault of the template is recognized by the start of its text.
        text = why if why.startswith(TEMPLATE_FAULT) else f"{SIDES[number % 2]}: {why}"
        problems.setdefault(number // 2, text)
    ends = np.cumsum(encoded.lengths)
    begins = ends - encoded.lengths
    mask = encoded.mask.copy()
    for row, is_text in enumerate(are_text):
        if row in problems:
            continue
        halves = [slice(int(begins[n]), int(ends[n])) for n in (2 * row, 2 * row + 1)]
        one, other = (encoded.tokens[half] for half in halves)
        if np.array_equal(one, other):
            problems[row] = SAME
        elif is_text:
            first = min(int(mask[half].argmax()) for half in halves)
            for half in halves:
                mask[half][first:] = True
    kept = np.ones(len(encoded.lengths), np.bool_)
    for row in problems:
        kept[2 * row : 2 * row + 2] = False
    return _of_rows(encoded, kept, problems, mask)
