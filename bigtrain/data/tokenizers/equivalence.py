"""Compares a fast encoder with the reference: on edge cases once, then on a share of the documents.

The edge cases (`edge_cases`) are compared once per tokenizer, library versions and CPU; of an
input's documents a share is compared in every run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bigtrain.data.tokenizers import edge_cases as edge_cases_module
from bigtrain.data.tokenizers import encoders as encoders_module
from bigtrain.data.tokenizers.edge_cases import tokenizer_edge_cases
from bigtrain.data.tokenizers.encoders import Encoded, Encoder, EncoderError
from bigtrain.system.user_cache import builds, cache_get, cache_put, key_of, processor, source_of

FIRST_CHECKED = 64
CHECKED_ONE_IN = 1000
CHECKED_PER_LEAD_BYTE = 8
PIECE_BYTES = 1 << 12
"""Most of one document that is compared: the reference takes a few milliseconds for it."""
FIRST_LEAD_BYTE = 0xC2
"""Of UTF-8: bytes below are ASCII or continue a character."""


def require_equal(fast: Encoder, reference: Encoder, contents: Sequence[bytes]) -> None:
    """Raises EncoderError naming the first of `contents` that `fast` encodes differently."""
    _compare(fast.encode_utf8(contents), range(len(contents)), reference, contents)


def _compare(
    found: Encoded, documents: Sequence[int], reference: Encoder, contents: Sequence[bytes]
) -> None:
    """`found` at `documents` against the reference's encoding of `contents`, one for one."""
    expected = reference.encode_utf8(contents)
    found_ends, expected_ends = np.cumsum(found.lengths), np.cumsum(expected.lengths)
    for number, document in enumerate(documents):
        have = found.tokens[found_ends[document] - found.lengths[document] : found_ends[document]]
        end = expected_ends[number]
        if not np.array_equal(have, expected.tokens[end - expected.lengths[number] : end]):
            text = contents[number].decode("utf-8")
            shown = ascii(text if len(text) <= 60 else text[:60] + "...")
            raise EncoderError(
                f"it encodes a text of {len(text)} characters, {shown}, otherwise than "
                f"{reference.engine()}"
            )


def prove(fast: Encoder, reference: Encoder) -> None:
    """Compare on the edge cases, once for these encoders, versions, tokenizer and CPU.

    Raises EncoderError if they differ; a difference is not cached, so it is raised every time.
    """
    key = _proof_key(fast, reference)
    if key is not None and cache_get("encoders", key) is not None:
        return
    sample = tokenizer_edge_cases(reference.tokenizer_json)
    require_equal(fast, reference, [text.encode("utf-8") for text in sample])
    if key is not None:
        cache_put("encoders", key, {"proven": f"{fast.engine()} as {reference.engine()}"})


def _proof_key(fast: Encoder, reference: Encoder) -> str | None:
    try:
        parts: list[str | bytes] = [
            source_of(__file__, encoders_module.__file__, edge_cases_module.__file__),
            builds(fast.library, reference.library),
            reference.tokenizer_json,
            processor(),
        ]
    except (OSError, LookupError):
        return None
    for encoder in (fast, reference):
        kind = type(encoder)
        parts += [kind.__module__, kind.__qualname__]
        parts += [str(encoder.end_of_document_id), str(encoder.parse_special_tokens)]
        parts += [str(encoder.beginning_ids)]
    return key_of(parts)


@dataclass(frozen=True)
class Checks:
    """What is compared of a batch: documents as encoded, and pieces of long ones by themselves."""

    documents: tuple[int, ...] = ()
    pieces: tuple[bytes, ...] = ()

    def run(
        self, fast: Encoder, reference: Encoder, contents: Sequence[bytes], encoded: Encoded
    ) -> None:
        """Raises EncoderError where `encoded` is not what the reference makes of `contents`."""
        if self.documents:
            _compare(encoded, self.documents, reference, [contents[i] for i in self.documents])
        if self.pieces:
            require_equal(fast, reference, self.pieces)


class CheckSampler:
    """Chooses the documents that are compared, by them and their order alone: the first 64, then
    one in 1,000, and the first 8 of every script, as told by the first bytes of UTF-8."""

    def __init__(self) -> None:
        self._seen = 0
        self._by_lead_byte: Counter[int] = Counter()
        self._is_new = np.arange(256) >= FIRST_LEAD_BYTE

    def choose(self, contents: Sequence[bytes]) -> Checks:
        documents: list[int] = []
        pieces: list[bytes] = []
        # All at once: of most batches none has a letter of a new script.
        any_new = self._new_lead_bytes(b"".join(c for c in contents if not c.isascii()))
        for index, content in enumerate(contents):
            number = self._seen + index
            begin = None
            if number < FIRST_CHECKED or number % CHECKED_ONE_IN == 0:
                begin = 0
            if any_new and not content.isascii() and (rare := self._new_lead_bytes(content)):
                begin = max(0, content.find(rare[:1]) - 256)
                for byte in set(rare):
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
        """Those in `content` that have not been seen often enough, in its order."""
        units = np.frombuffer(content, np.uint8)
        leads = units[units >= FIRST_LEAD_BYTE]
        return leads[self._is_new[leads]].tobytes()
