"""Encoders: documents to tokens, by the fastest library that is proven equal to the reference.

The reference is `tokenizers`; gigatoken and fastokens encode the same text 20 to 40 times faster,
but are young. A fast one is used only while it agrees with the reference: on a fixed hard sample
(once per tokenizer, versions and processor), then on a share of the documents themselves
(`CheckSampler`). What a fast one wrote before it was found wrong is written again, so no token
depends on the choice.
"""

from __future__ import annotations

import json
import logging
import platform
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from itertools import chain
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from bigtrain.data import hard_sample as hard_sample_module
from bigtrain.data.hard_sample import hard_sample
from bigtrain.data.known import builds, key_of, recall, remember, source_of
from bigtrain.errors import DataError

logger = logging.getLogger(__name__)

Choice = Literal["auto", "gigatoken", "fastokens", "reference"]
CHOICES: tuple[Choice, ...] = ("auto", "gigatoken", "fastokens", "reference")

FIRST_CHECKED = 64
CHECKED_ONE_IN = 1000
CHECKED_PER_LEAD_BYTE = 8
PIECE_BYTES = 1 << 12
"""Most of one document that is compared: the reference takes a few milliseconds for it."""


@dataclass(frozen=True)
class Encoded:
    """Documents as tokens: `tokens` integers [sum of lengths], `lengths` int64 [documents].

    Each document ends with the end-of-document token, counted in its length; a document without
    tokens has length 0 and no end, as in Megatron's ``preprocess_data.py``.
    """

    tokens: npt.NDArray[np.integer[Any]]
    lengths: npt.NDArray[np.int64]


class EncoderError(Exception):
    """A fast encoder cannot be used: the text is the reason, for the log and the manifest."""


class Encoder(ABC):
    """Turns documents into tokens. Can be pickled; the library is loaded at the first use.

    `end_of_document_id` is None where documents get no end (chat, whose template writes it).
    Special tokens are not added. Without `parse_special_tokens` they are not recognised either: a
    document that holds the letters ``<|endoftext|>`` becomes the tokens of these letters, so no
    document can inject a control token.
    """

    library: str

    def __init__(
        self,
        tokenizer_json: str,
        end_of_document_id: int | None,
        parse_special_tokens: bool = False,
    ) -> None:
        self.tokenizer_json = tokenizer_json
        self.end_of_document_id = end_of_document_id
        self.parse_special_tokens = parse_special_tokens
        self._backend: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_backend": None}

    def encode(self, texts: Sequence[str]) -> Encoded:
        """`encode_utf8` of texts."""
        return self.encode_utf8([text.encode("utf-8") for text in texts])

    def encode_utf8(self, contents: Sequence[bytes]) -> Encoded:
        """Encode documents given as UTF-8, in all threads the library was given.

        That is RAYON_NUM_THREADS, or all cores. Raises EncoderError where a fast library fails.
        """
        if self._backend is None:
            self._backend = self._load()
        tokens, lengths = self._encode(contents)
        if self.end_of_document_id is None:
            return Encoded(tokens, lengths)
        full = lengths > 0
        with_end = lengths + full
        ends = np.cumsum(with_end)
        result = np.empty(int(with_end.sum()), tokens.dtype)
        is_token = np.ones(len(result), bool)
        is_token[ends[full] - 1] = False
        result[ends[full] - 1] = self.end_of_document_id
        result[is_token] = tokens
        return Encoded(result, with_end)

    @classmethod
    def engine(cls) -> str:
        """Library and version, for the manifest."""
        return f"{cls.library} {metadata.version(cls.library)}"

    @abstractmethod
    def _load(self) -> Any: ...

    @abstractmethod
    def _encode(
        self, contents: Sequence[bytes]
    ) -> tuple[npt.NDArray[np.integer[Any]], npt.NDArray[np.int64]]:
        """Tokens of all documents without ends, and how many each has."""


class ReferenceEncoder(Encoder):
    """What `transformers` itself encodes with."""

    library = "tokenizers"

    def _load(self) -> Any:
        from tokenizers import Tokenizer

        backend = Tokenizer.from_str(self.tokenizer_json)
        backend.encode_special_tokens = not self.parse_special_tokens
        backend.no_truncation()
        backend.no_padding()
        return backend

    def _encode(
        self, contents: Sequence[bytes]
    ) -> tuple[npt.NDArray[np.integer[Any]], npt.NDArray[np.int64]]:
        texts = [content.decode("utf-8") for content in contents]
        ids = [e.ids for e in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        return np.fromiter(chain.from_iterable(ids), np.int64, int(lengths.sum())), lengths


class _FastEncoder(Encoder):
    """A library whose failures mean that it cannot be used, not that the input is wrong."""

    def encode_utf8(self, contents: Sequence[bytes]) -> Encoded:
        """See `Encoder`."""
        try:
            return super().encode_utf8(contents)
        except (KeyboardInterrupt, SystemExit, MemoryError, EncoderError):
            raise
        except BaseException as error:  # a panic in Rust is no Exception
            raise EncoderError(
                f"it fails with {type(error).__name__}: {str(error)[:200]}"
            ) from error


class GigatokenEncoder(_FastEncoder):
    """gigatoken, which takes UTF-8 without a copy. One thread in a worker process."""

    library = "gigatoken"

    def _load(self) -> Any:
        import gigatoken

        tree = json.loads(self.tokenizer_json)
        if not self.parse_special_tokens:
            # As `encode_special_tokens` of the reference: added tokens that are not special stay.
            tree["added_tokens"] = [t for t in tree.get("added_tokens", []) if not t["special"]]
        return gigatoken.Tokenizer.from_json(json.dumps(tree))

    def _encode(
        self, contents: Sequence[bytes]
    ) -> tuple[npt.NDArray[np.integer[Any]], npt.NDArray[np.int64]]:
        layout = self._backend.encode_batch(list(contents)).layout
        offsets: npt.NDArray[np.int64] = np.asarray(layout.offsets.data, np.int64)
        tokens = np.asarray(layout.content.data)[int(offsets[0]) : int(offsets[-1])]
        return tokens, offsets[1:] - offsets[:-1]


class FastokensEncoder(_FastEncoder):
    """fastokens."""

    library = "fastokens"

    def _load(self) -> Any:
        import fastokens

        backend = fastokens.Tokenizer.from_json_str(self.tokenizer_json)
        backend.no_truncation()
        return backend

    def _encode(
        self, contents: Sequence[bytes]
    ) -> tuple[npt.NDArray[np.integer[Any]], npt.NDArray[np.int64]]:
        ids, offsets = self._backend.encode_batch_flat(
            [content.decode("utf-8") for content in contents],
            add_special_tokens=False,
            split_special_tokens=not self.parse_special_tokens,
        )
        ends = np.frombuffer(offsets, "<i8")
        return np.frombuffer(ids, "<u4"), ends[1:] - ends[:-1]


FAST_ENCODERS: dict[str, type[Encoder]] = {
    "gigatoken": GigatokenEncoder,
    "fastokens": FastokensEncoder,
}
"""Fastest first."""


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
    """Compare on the hard sample, once for these encoders, versions, tokenizer and processor.

    Raises EncoderError where they differ; that is found out, and said, every time.
    """
    key = _proof_key(fast, reference)
    if key is not None and recall("encoders", key) is not None:
        return
    sample = hard_sample(reference.tokenizer_json)
    require_equal(fast, reference, [text.encode("utf-8") for text in sample])
    if key is not None:
        remember("encoders", key, {"proven": f"{fast.engine()} as {reference.engine()}"})


def _proof_key(fast: Encoder, reference: Encoder) -> str | None:
    try:
        parts: list[str | bytes] = [
            source_of(__file__, hard_sample_module.__file__),
            builds(fast.library, reference.library),
            reference.tokenizer_json,
            _processor(),
        ]
    except (OSError, LookupError):
        return None
    for encoder in (fast, reference):
        kind = type(encoder)
        parts += [kind.__module__, kind.__qualname__]
        parts += [str(encoder.end_of_document_id), str(encoder.parse_special_tokens)]
    return key_of(parts)


def _processor() -> str:
    """What a library may choose its instructions by: a home directory serves many machines."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith(("flags", "Features")):
                return line
    return f"{platform.machine()} {platform.processor()} {platform.node()}"


@dataclass(frozen=True)
class Checks:
    """What of a batch is compared: documents as encoded, and pieces of long ones on their own."""

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
    """Chooses the documents that are compared: the first 64, then one in 1,000.

    And the first 8 of every script, as told by the first bytes of its UTF-8 characters. The
    choice depends on the documents and their order alone.
    """

    def __init__(self) -> None:
        self._seen = 0
        self._by_lead_byte: Counter[int] = Counter()
        self._known = bytes(range(0xC2))  # ASCII and continuation bytes

    def choose(self, contents: Sequence[bytes]) -> Checks:
        """Checks for the next documents of the stream."""
        documents: list[int] = []
        pieces: list[bytes] = []
        for index, content in enumerate(contents):
            number = self._seen + index
            begin = None
            if number < FIRST_CHECKED or number % CHECKED_ONE_IN == 0:
                begin = 0
            if not content.isascii() and (rare := content.translate(None, self._known)):
                begin = max(0, content.find(rare[:1]) - 256)
                self._count(rare)
            if begin is None:
                continue
            if len(content) <= PIECE_BYTES:
                documents.append(index)
            else:
                piece = content[begin : begin + PIECE_BYTES]
                pieces.append(piece.decode("utf-8", "ignore").encode("utf-8"))
        self._seen += len(contents)
        return Checks(tuple(documents), tuple(pieces))

    def _count(self, lead_bytes: bytes) -> None:
        for byte in set(lead_bytes):
            self._by_lead_byte[byte] += 1
            if self._by_lead_byte[byte] == CHECKED_PER_LEAD_BYTE:
                self._known += bytes([byte])


@dataclass
class EncoderQueue:
    """The encoders to try, fastest first, and why those before the current one were left.

    `current` is proven on the hard sample. Raises nothing: the reference is always the last.
    """

    reference: ReferenceEncoder
    candidates: list[type[Encoder]]
    reasons: list[str] = field(default_factory=list)
    current: Encoder = field(init=False)

    def __post_init__(self) -> None:
        self._advance()

    @property
    def is_reference(self) -> bool:
        return self.current is self.reference

    @property
    def reason(self) -> str:
        """Why this encoder and no faster one; empty for the fastest there is."""
        return "; ".join(self.reasons)

    def reject(self, why: str) -> None:
        """Leave the current encoder for the next, and say so in the log."""
        self._note(self.current, why)
        self._advance()

    def _note(self, encoder: Encoder, why: str) -> None:
        self.reasons.append(f"not {encoder.engine()}: {why}")
        logger.warning("encoder %s is not used: %s", encoder.engine(), why)

    def _advance(self) -> None:
        while self.candidates:
            reference = self.reference
            kind = self.candidates.pop(0)
            encoder = kind(
                reference.tokenizer_json,
                reference.end_of_document_id,
                reference.parse_special_tokens,
            )
            try:
                prove(encoder, reference)
            except EncoderError as error:
                self._note(encoder, str(error))
                continue
            self.current = encoder
            return
        self.current = self.reference


def choose_encoder(
    reference: ReferenceEncoder, choice: Choice, read_once: bool = False
) -> EncoderQueue:
    """The encoders that `choice` allows, the current one proven on the hard sample.

    `read_once`: the input can be read only once, so that nothing could be written again
    after a fast encoder is found wrong; then it is the reference from the beginning. Raises
    DataError for an unknown choice.
    """
    if choice not in CHOICES:
        raise DataError(f"--encoder {choice}: not one of {', '.join(CHOICES)}")
    if choice == "reference":
        return EncoderQueue(reference, [], ["asked for: --encoder reference"])
    if read_once:
        reason = "the input can be read only once, and a fast encoder's work not be done again"
        logger.warning("the reference encoder is used: %s", reason)
        return EncoderQueue(reference, [], [reason])
    if choice == "auto":
        return EncoderQueue(reference, list(FAST_ENCODERS.values()))
    return EncoderQueue(reference, [FAST_ENCODERS[choice]])
