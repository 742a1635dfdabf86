"""Encoders of documents to tokens. The reference is `tokenizers`, which `transformers` uses.

gigatoken and fastokens are 20 to 40 times faster, but young: one is used only while
`bigtrain.data.tokenizers.equivalence` finds no difference.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Encoded:
    """Documents as tokens: `tokens` integers [sum of lengths], `lengths` int64 [documents]. Each
    document begins with the beginning-of-text tokens and ends with the end-of-document token, which
    count in its length, and are not repeated if the text itself spells them. A document without
    tokens has length 0, and gets none, as in Megatron's ``preprocess_data.py``."""

    tokens: npt.NDArray[np.integer[Any]]
    lengths: npt.NDArray[np.int64]


class EncoderError(Exception):
    """Failure of a fast encoder: the text is the reason, for the log and the manifest."""


@dataclass(eq=False)
class Encoder(ABC):
    """Encoder of documents to tokens. Can be pickled; the library is loaded at the first use.

    `end_of_document_id`: None if documents get no end (chat, whose template writes it);
    `beginning_ids`: start of every document. Other special tokens are not added. Without
    `parse_special_tokens` they are not recognised either: a document with the text
    ``<|endoftext|>`` gets the tokens of its letters, so no document can inject a control token.
    """

    library: ClassVar[str]
    uses_all_cores: ClassVar[bool] = False
    """True if a call does; concurrent calls then use cores that its last documents leave idle."""

    tokenizer_json: str = field(repr=False)
    end_of_document_id: int | None
    parse_special_tokens: bool = False
    beginning_ids: tuple[int, ...] = ()
    _backend: Any = field(default=None, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_backend": None}

    def encode(self, texts: Sequence[str]) -> Encoded:
        return self.encode_utf8([text.encode("utf-8") for text in texts])

    def encode_utf8(self, contents: Sequence[bytes], *, has_ends: bool = True) -> Encoded:
        """Encode documents given as UTF-8, in all threads of the library. Their number is
        RAYON_NUM_THREADS, or the number of cores. `has_ends`: with beginnings and ends. Raises
        EncoderError if a fast library fails."""
        if self._backend is None:
            self._backend = self._load()
        plain = self._encode(contents)
        beginning_ids, end_id = self.beginning_ids, self.end_of_document_id
        if not has_ends or (not beginning_ids and end_id is None):
            return plain

        # If special tokens are parsed, a text may itself contain its beginning and its end, which
        # are then not inserted. A text is begun if it begins with all of `beginning_ids`: each
        # comparison keeps the texts that still match.
        tokens, lengths = plain.tokens, plain.lengths
        last_positions = np.cumsum(lengths) - 1
        first_positions = last_positions - lengths + 1
        is_begun = (lengths >= max(1, len(beginning_ids))) & self.parse_special_tokens
        for offset, id_ in enumerate(beginning_ids):
            is_begun[is_begun] = tokens[(first_positions + offset)[is_begun]] == id_
        is_ended = (lengths > 0) & (self.parse_special_tokens or end_id is None)
        if end_id is not None:
            is_ended[is_ended] = tokens[last_positions[is_ended]] == end_id

        # Positions of the inserted tokens; the tokens of the texts fill all other positions.
        gets_begin, gets_end = (lengths > 0) & ~is_begun, (lengths > 0) & ~is_ended
        new_lengths = lengths + gets_begin * len(beginning_ids) + gets_end
        new_ends = np.cumsum(new_lengths)
        result = np.empty(int(new_lengths.sum()), tokens.dtype)
        is_of_text = np.ones(len(result), bool)
        begins = (new_ends - new_lengths)[gets_begin]
        insertions = [(begins + offset, id_) for offset, id_ in enumerate(beginning_ids)]
        if end_id is not None:
            insertions.append((new_ends[gets_end] - 1, end_id))
        for positions, id_ in insertions:
            is_of_text[positions] = False
            result[positions] = id_
        result[is_of_text] = tokens
        return Encoded(result, new_lengths)

    @classmethod
    def engine(cls) -> str:
        """Return library and version, for the manifest, or that it is not installed."""
        try:
            return f"{cls.library} {metadata.version(cls.library)}"
        except metadata.PackageNotFoundError:
            return f"{cls.library} (not installed)"

    @abstractmethod
    def _load(self) -> Any: ...

    @abstractmethod
    def _encode(self, contents: Sequence[bytes]) -> Encoded:
        """Encode documents without beginnings and ends."""


class ReferenceEncoder(Encoder):
    """Encoder that `transformers` itself uses."""

    library = "tokenizers"
    uses_all_cores = True

    def _load(self) -> Any:
        from tokenizers import Tokenizer

        tokenizer_json = self.tokenizer_json
        if not self.parse_special_tokens:
            # Rename special tokens in the vocabulary, so that the model encodes no text as one.
            tree = json.loads(tokenizer_json)
            added = tree.get("added_tokens") or []
            special = {token["content"] for token in added if token["special"]}
            if hidden := hide_words(tree["model"], special):
                for token in added:
                    token["content"] = hidden.get(token["content"], token["content"])
                tree["post_processor"] = None  # it names special tokens, and adds none here
                tokenizer_json = json.dumps(tree)
        backend = Tokenizer.from_str(tokenizer_json)
        backend.encode_special_tokens = not self.parse_special_tokens
        backend.no_truncation()
        backend.no_padding()
        return backend

    def _encode(self, contents: Sequence[bytes]) -> Encoded:
        texts = [content.decode("utf-8") for content in contents]
        ids = [e.ids for e in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        tokens = np.fromiter(chain.from_iterable(ids), np.int64, int(lengths.sum()))
        return Encoded(tokens, lengths)


def hide_words(model: dict[str, Any], words: Collection[str]) -> dict[str, str]:
    """Rename `words` in the vocabulary of a `tokenizer.json`'s ``model``, so that no text is
    encoded as one of `words`; return the new names. Ids do not change. A Unigram, WordPiece or
    WordLevel model encodes any text in its vocabulary as a token, including special tokens. A BPE
    model follows its merges, unless it ignores them for words that are tokens."""
    vocabulary = model.get("vocab") or []
    # Words that must keep their names: of the unknown token, and words that merges name.
    kept_words = {model.get("unk_token")}
    if "merges" in model:
        if not model.get("ignore_merges"):
            return {}
        pairs = (pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"])
        kept_words.update(part for pair in pairs for part in (*pair, "".join(pair)))
    new_names = {word: f"\U0010fffd{word}" for word in words if word not in kept_words}
    if isinstance(vocabulary, dict):
        new_names = {word: name for word, name in new_names.items() if word in vocabulary}
        model["vocab"] = {new_names.get(word, word): id_ for word, id_ in vocabulary.items()}
        return new_names
    present = {word for word, _ in vocabulary}
    model["vocab"] = [[new_names.get(word, word), score] for word, score in vocabulary]
    return {word: name for word, name in new_names.items() if word in present}


class _FastEncoder(Encoder):
    """Encoder by a library whose failures mean that it is unusable, not that the input is wrong."""

    def encode_utf8(self, contents: Sequence[bytes], *, has_ends: bool = True) -> Encoded:
        try:
            return super().encode_utf8(contents, has_ends=has_ends)
        except (KeyboardInterrupt, SystemExit, MemoryError, EncoderError):
            raise
        except BaseException as error:  # a panic in Rust is not an Exception
            raise EncoderError(
                f"it fails with {type(error).__name__}: {str(error)[:200]}"
            ) from error


class GigatokenEncoder(_FastEncoder):
    """Encoder by gigatoken, which reads UTF-8 without a copy. One thread in a worker process."""

    library = "gigatoken"

    def _load(self) -> Any:
        import gigatoken

        tree = json.loads(self.tokenizer_json)
        if not self.parse_special_tokens:
            # Like `encode_special_tokens` of the reference: added tokens that are not special stay.
            tree["added_tokens"] = [t for t in tree.get("added_tokens", []) if not t["special"]]
        return gigatoken.Tokenizer.from_json(json.dumps(tree))

    def _encode(self, contents: Sequence[bytes]) -> Encoded:
        layout = self._backend.encode_batch(list(contents)).layout
        offsets: npt.NDArray[np.int64] = np.asarray(layout.offsets.data, np.int64)
        tokens = np.asarray(layout.content.data)[int(offsets[0]) : int(offsets[-1])]
        return Encoded(tokens, offsets[1:] - offsets[:-1])


class FastokensEncoder(_FastEncoder):
    """Encoder by fastokens."""

    library = "fastokens"

    def _load(self) -> Any:
        import fastokens

        backend = fastokens.Tokenizer.from_json_str(self.tokenizer_json)
        backend.no_truncation()
        return backend

    def _encode(self, contents: Sequence[bytes]) -> Encoded:
        ids, offsets = self._backend.encode_batch_flat(
            [content.decode("utf-8") for content in contents],
            add_special_tokens=False,
            split_special_tokens=not self.parse_special_tokens,
        )
        ends = np.frombuffer(offsets, "<i8")
        return Encoded(np.frombuffer(ids, "<u4"), ends[1:] - ends[:-1])


FAST_ENCODERS: dict[str, type[Encoder]] = {
    "gigatoken": GigatokenEncoder,
    "fastokens": FastokensEncoder,
}
"""Fastest first."""
