"""Forms of a document: rows of tokens, plain text, and conversations, as text to encode.

Each form has the text that the tokenizer encodes, and makes tokens and mask of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from bigtrain.data.chat.control_tokens import ControlTokens
from bigtrain.data.chat.marked_strings import ChatPart
from bigtrain.data.documents.token_rows import TokenRow
from bigtrain.data.shards.format import Mask, Weights

Integers = npt.NDArray[np.int64]
Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class TextEnds:
    """Tokens that the tokenizer adds at the start of every text, and the token (id and text) that
    ends a document."""

    prefix: tuple[int, ...]
    end_id: int
    end_text: str


class BatchResult(NamedTuple):
    """Encoding of a text in a batch. mask: of a conversation; None if token bytes do not determine
    it. prompt: tokens of the prompt of plain text; None if the batch does not determine them."""

    tokens: npt.NDArray[np.integer[Any]]
    mask: Mask | None = None
    prompt: list[int] | None = None


class DocumentTokens(NamedTuple):
    """Tokens of a document. weights: factors of the losses; None if all are 1."""

    tokens: npt.NDArray[np.integer[Any]]
    mask: Mask
    weights: Weights | None = None


@dataclass(frozen=True)
class TokenizedRow:
    """Row that is already tokenized, without text."""

    row: TokenRow
    text: ClassVar[str] = ""
    control: ClassVar[Spans | None] = None
    target_noun: ClassVar[str] = "token after the first"

    def tokens_and_mask(self, batch: BatchResult, control: ControlTokens) -> DocumentTokens:
        return DocumentTokens(self.row.tokens, self.row.learned, self.row.weights)


@dataclass(frozen=True)
class PlainText:
    """Prompt and completion as plain text; `text` is both together. `control`: ranges of control
    tokens in `text`; None if every occurrence of a control token's text is a control token.
    is_open: no end-of-document token is added. may_have_start: the text may spell `ends.prefix`."""

    prompt: str
    text: str
    control: Spans | None
    ends: TextEnds
    is_open: bool = False
    may_have_start: bool = False
    target_noun: ClassVar[str] = "assistant tokens"

    def tokens_and_mask(self, batch: BatchResult, control: ControlTokens) -> DocumentTokens:
        """Return tokens and mask as TRL's: tokens are learned from the first one that differs from
        the encoded prompt, also if it contains the end of the prompt."""
        tokens, prompt = batch.tokens, batch.prompt
        if prompt is None:
            prompt = control.encode(self.prompt, self.control)[0].tolist()
            tokens, _ = control.encode(self.text, self.control)
        ids = tokens.tolist()
        num_common = 0
        while num_common < min(len(ids), len(prompt)) and ids[num_common] == prompt[num_common]:
            num_common += 1
        prefix = list(self.ends.prefix)
        if self.may_have_start and ids[: len(prefix)] == prefix:  # the text spells the prefix
            prefix = []
        end = [] if self.is_open else [self.ends.end_id]
        full = np.array([*prefix, *ids, *end], np.int64)
        return DocumentTokens(full, np.arange(len(full)) >= len(prefix) + num_common)


@dataclass(frozen=True)
class RenderedChat:
    """Messages as text. `spans`: learned character ranges; `weights`: factors of the losses in the
    ranges, None if all are 1. `control`: ranges of the template's control tokens; None if every
    occurrence of a control token's text is a control token. `dropped`: parts that the template does
    not write. `ends`: texts of the control tokens that end answers. `inner_controls`: texts of
    other control tokens in answers."""

    text: str
    spans: Spans
    control: Spans | None
    dropped: tuple[ChatPart, ...] = ()
    weights: tuple[float, ...] | None = None
    ends: frozenset[str] = frozenset()
    inner_controls: frozenset[str] = frozenset()
    target_noun: ClassVar[str] = "assistant tokens"

    def tokens_and_mask(self, batch: BatchResult, control: ControlTokens) -> DocumentTokens:
        if batch.mask is not None:
            return DocumentTokens(batch.tokens, batch.mask)
        return self._encode_slowly(control)

    def _encode_slowly(self, control: ControlTokens) -> DocumentTokens:
        """Return tokens, mask and weights by the character ranges of the reference tokenizer."""
        tokens, ranges = control.encode(self.text, self.control)
        mask, weights = np.zeros(len(tokens), np.bool_), np.ones(len(tokens), np.float32)
        span_weights = self.weights or (1.0,) * len(self.spans)
        for (begin, end), weight in zip(self.spans, span_weights, strict=True):
            # transformers' rule: a range begins with the first token that has its first character,
            # and ends with the first token that has its last character. If no token has one of the
            # two characters, since the tokenizer drops it, the tokens inside the range count.
            first, last = _first_at(ranges, begin), _first_at(ranges, end - 1)
            if first is None or last is None:
                tokens_inside = np.flatnonzero((ranges[:, 1] > begin) & (ranges[:, 0] < end))
                if not len(tokens_inside):
                    continue
                first = int(tokens_inside[0]) if first is None else first
                last = int(tokens_inside[-1]) if last is None else last
            mask[first : last + 1] = True
            weights[first : last + 1] = weight
        return DocumentTokens(tokens, mask, None if self.weights is None else weights)


Document = TokenizedRow | PlainText | RenderedChat


def _first_at(ranges: Integers, position: int) -> int | None:
    """Return the first token whose character range contains `position`."""
    matches = np.flatnonzero((ranges[:, 0] <= position) & (ranges[:, 1] > position))
    return int(matches[0]) if len(matches) else None
