"""Selection of the fastest encoder that equals the reference.

The edge cases (fixed texts and a seeded generator) are compared once per tokenizer, library
versions and CPU; in every run also a fraction of the input's documents. Units written by a fast
encoder before it was found wrong are built again, so no token depends on the selection.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from bigtrain.data.tokenizers import edge_cases
from bigtrain.data.tokenizers import encoders as encoders_module
from bigtrain.data.tokenizers.edge_cases import tokenizer_edge_cases
from bigtrain.data.tokenizers.encoders import (
    FAST_ENCODERS,
    Encoded,
    Encoder,
    EncoderError,
    ReferenceEncoder,
)
from bigtrain.errors import DataError
from bigtrain.system.user_cache import (
    cache_get,
    cache_put,
    key_of,
    package_fingerprints,
    processor,
    source_of,
)

FIRST_CHECKED = 64
CHECKED_ONE_IN = 1000
CHECKED_PER_LEAD_BYTE = 8
PIECE_BYTES = 1 << 12
"""Maximum of one document that is compared: the reference takes a few milliseconds for it."""
BYTES_BEFORE_NEW = 256
"""Bytes of a piece before the first letter of a script that is new."""
FIRST_LEAD_BYTE = 0xC2
"""First lead byte of UTF-8: bytes below are ASCII or continue a character."""


def require_equal(fast: Encoder, reference: Encoder, contents: Sequence[bytes]) -> None:
    """Raise EncoderError with the first of `contents` that `fast` encodes differently."""
    _compare(fast.encode_utf8(contents), range(len(contents)), reference, contents)


def _compare(
    encoded: Encoded, documents: Sequence[int], reference: Encoder, contents: Sequence[bytes]
) -> None:
    """Raise EncoderError unless the tokens of `documents` in `encoded` are the tokens by which the
    reference encodes `contents`, one for each of `documents`."""
    expected = reference.encode_utf8(contents)
    ends, expected_ends = np.cumsum(encoded.lengths), np.cumsum(expected.lengths)
    for index, document in enumerate(documents):
        end, expected_end = ends[document], expected_ends[index]
        tokens = encoded.tokens[end - encoded.lengths[document] : end]
        expected_tokens = expected.tokens[expected_end - expected.lengths[index] : expected_end]
        if not np.array_equal(tokens, expected_tokens):
            text = contents[index].decode("utf-8")
            excerpt = ascii(text if len(text) <= 60 else text[:60] + "...")
            raise EncoderError(
                f"it encodes a text of {len(text)} characters, {excerpt}, differently from "
                f"{reference.engine()}"
            )


def check_equivalence(fast: Encoder, reference: Encoder) -> None:
    """Compare encoders on the edge cases, once for these encoders, versions, tokenizer and CPU.
    Raises EncoderError if they differ; a difference is not cached, so it is raised every time."""
    key = _proof_key(fast, reference)
    if key is not None and cache_get("encoders", key) is not None:
        return
    sample = tokenizer_edge_cases(reference.tokenizer_json)
    require_equal(fast, reference, [text.encode("utf-8") for text in sample])
    if key is not None:
        cache_put("encoders", key, {"proven": f"{fast.engine()} as {reference.engine()}"})


def _proof_key(fast: Encoder, reference: Encoder) -> str | None:
    """Return the cache key of the comparison of two encoders; None if it cannot be computed."""
    try:
        parts: list[str | bytes] = [
            source_of(__file__, encoders_module.__file__, edge_cases.__file__),
            package_fingerprints(fast.library, reference.library),
            reference.tokenizer_json,
            processor(),
        ]
    except (OSError, LookupError):
        return None
    for encoder in (fast, reference):
        encoder_class = type(encoder)
        parts += [encoder_class.__module__, encoder_class.__qualname__]
        parts += [str(encoder.end_of_document_id), str(encoder.parse_special_tokens)]
        parts += [str(encoder.beginning_ids)]
    return key_of(parts)


@dataclass(frozen=True)
class Checks:
    """Documents of a batch to compare: complete ones by number, and pieces of long ones."""

    documents: tuple[int, ...] = ()
    pieces: tuple[bytes, ...] = ()

    def run(
        self, fast: Encoder, reference: Encoder, contents: Sequence[bytes], encoded: Encoded
    ) -> None:
        """Raise EncoderError if `encoded` differs from the reference's encoding of `contents`."""
        if self.documents:
            _compare(encoded, self.documents, reference, [contents[i] for i in self.documents])
        if self.pieces:
            require_equal(fast, reference, self.pieces)


class CheckSampler:
    """Sampler of the documents to compare, determined by them and their order: the first 64, then
    one in 1,000, and the first 8 of every script, identified by the first bytes of UTF-8."""

    def __init__(self) -> None:
        self._seen = 0
        self._by_lead_byte: Counter[int] = Counter()
        self._is_new = np.arange(256) >= FIRST_LEAD_BYTE

    def choose(self, contents: Sequence[bytes]) -> Checks:
        """Return the documents of a batch to compare."""
        documents: list[int] = []
        pieces: list[bytes] = []
        # All at once: most batches have no letter of a new script.
        any_new = self._new_lead_bytes(b"".join(c for c in contents if not c.isascii()))
        for index, content in enumerate(contents):
            number = self._seen + index
            begin = None  # of the piece that is compared; None: no comparison
            if number < FIRST_CHECKED or number % CHECKED_ONE_IN == 0:
                begin = 0
            if any_new and not content.isascii() and (new_bytes := self._new_lead_bytes(content)):
                begin = max(0, content.find(new_bytes[:1]) - BYTES_BEFORE_NEW)
                for byte in set(new_bytes):
                    self._by_lead_byte[byte] += 1
                    self._is_new[byte] = self._by_lead_byte[byte] < CHECKED_PER_LEAD_BYTE
            if begin is None:
                continue
            if len(content) <= PIECE_BYTES:
                documents.append(index)
            else:
                piece = content[begin : begin + PIECE_BYTES]
                pieces.append(piece.decode("utf-8", "ignore").encode("utf-8"))
        self._seen += len(contents)
        return Checks(tuple(documents), tuple(pieces))

    def _new_lead_bytes(self, content: bytes) -> bytes:
        """Return lead bytes in `content` that were not seen often enough yet, in order."""
        units = np.frombuffer(content, np.uint8)
        leads = units[units >= FIRST_LEAD_BYTE]
        return leads[self._is_new[leads]].tobytes()


logger = logging.getLogger(__name__)

Choice = Literal["auto", "gigatoken", "fastokens", "reference"]
CHOICES: tuple[Choice, ...] = get_args(Choice)


@dataclass
class EncoderQueue:
    """Encoders to use, fastest first, and the reasons why earlier ones were rejected. `current`
    agrees with the reference on the edge cases; the reference itself is the last."""

    reference: ReferenceEncoder
    candidates: list[type[Encoder]]
    reasons: list[str] = field(default_factory=list)
    current: Encoder = field(init=False)

    def __post_init__(self) -> None:
        self._advance()

    @property
    def reason(self) -> str:
        """Reason why this encoder is used and no faster one; empty for the fastest."""
        return "; ".join(self.reasons)

    def reject(self, reason: str) -> None:
        """Reject the current encoder, select the next, and log it."""
        self._note(self.current, reason)
        self._advance()

    def _note(self, encoder: Encoder, reason: str) -> None:
        self.reasons.append(f"not {encoder.engine()}: {reason}")
        logger.warning(
            "encoder %s is not used: %s; a slower one makes the tokens, and nothing is to be done",
            encoder.engine(),
            reason if len(reason) <= 200 else f"{reason[:200]}...",
        )

    def _advance(self) -> None:
        """Set `current` to the next candidate that agrees on the edge cases, or the reference."""
        while self.candidates:
            reference = self.reference
            encoder_class = self.candidates.pop(0)
            encoder = encoder_class(
                reference.tokenizer_json,
                reference.end_of_document_id,
                reference.parse_special_tokens,
                reference.beginning_ids,
            )
            try:
                check_equivalence(encoder, reference)
            except EncoderError as error:
                self._note(encoder, str(error))
                continue
            self.current = encoder
            return
        self.current = self.reference


def choose_encoder(
    reference: ReferenceEncoder, choice: Choice, read_once: bool = False
) -> EncoderQueue:
    """Return the encoders that `choice` allows; the current one agrees on the edge cases.
    `read_once`: the input can be read only once, so no unit could be rebuilt if a fast encoder
    turns out wrong; then only the reference is used. Raises DataError for an unknown choice."""
    if choice not in CHOICES:
        raise DataError(f"--encoder {choice}: not one of {', '.join(CHOICES)}")
    if choice == "reference":
        return EncoderQueue(reference, [], ["requested: --encoder reference"])
    if read_once:
        reason = "the input can be read only once, so a fast encoder's work could not be repeated"
        logger.warning("the reference encoder is used: %s", reason)
        return EncoderQueue(reference, [], [reason])
    if choice == "auto":
        return EncoderQueue(reference, list(FAST_ENCODERS.values()))
    return EncoderQueue(reference, [FAST_ENCODERS[choice]])
