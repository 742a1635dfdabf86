"""Fill-in-the-middle: a seeded share of the documents, rearranged (Bavarian et al. 2022).

A document of characters is cut at two places, drawn uniformly, into prefix, middle and suffix, and
these are encoded separately, as they are at inference::

    PSM   <prefix> prefix <suffix> suffix <middle> middle
    SPM   <prefix> <suffix> suffix <middle> prefix middle

where <prefix>, <suffix> and <middle> are control tokens of the tokenizer, in StarCoder's order of
both modes. Everything is drawn from the document's text and the seed, so the result does not
depend on workers, shards or the order of the input. Held-out documents stay as they are: their loss
is comparable with the loss of a model without this transformation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from bigtrain.data.shards.manifest import FillInMiddleRecord
from bigtrain.data.tokenizers.encoders import Encoded, Encoder
from bigtrain.data.tokenizers.equivalence import Checks
from bigtrain.data.tokenizers.tokenizer import Tokenizer
from bigtrain.errors import DataError

Mode = Literal["psm", "spm"]

KNOWN_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("[PREFIX]", "[SUFFIX]", "[MIDDLE]"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),
    ("<PRE>", "<SUF>", "<MID>"),
)
"""Names of the tokens before prefix, suffix and middle in Qwen and Gemma, StarCoder, SantaCoder,
Codestral, Code Llama and DeepSeek."""
_SELECTION_STREAM, _MODE_STREAM, _CUT_STREAMS = 1, 2, (3, 4)
"""Streams of draws; stream 0 of seed 0 selects held-out documents."""
_PROBES = ("b", "(", "\n")
"""Texts that a suitable tokenizer encodes alike after another text and at the start."""


@dataclass(frozen=True)
class Cut:
    """Parts of a document in the order of the text."""

    mode: Mode
    prefix: bytes
    middle: bytes
    suffix: bytes


@dataclass(frozen=True)
class FillInMiddle:
    """Transformation of documents. `ids`: of the tokens before prefix, suffix and middle."""

    rule: FillInMiddleRecord
    ids: tuple[int, int, int]

    def cut(self, content: bytes) -> Cut | None:
        """Return the parts of the document with UTF-8 `content`; None if it stays as it is."""
        if not content or self._draw(content, _SELECTION_STREAM) >= int(self.rule.rate * 2**64):
            return None
        text = content.decode("utf-8")
        # A draw below 2^64, scaled to a position of the text or its end.
        num_positions = len(text) + 1
        low, high = sorted(self._draw(content, n) * num_positions >> 64 for n in _CUT_STREAMS)
        is_spm = self._draw(content, _MODE_STREAM) < int(self.rule.spm_rate * 2**64)
        parts = (text[:low], text[low:high], text[high:])
        return Cut("spm" if is_spm else "psm", *(part.encode("utf-8") for part in parts))

    def _draw(self, content: bytes, stream: int) -> int:
        """Return a number below 2^64."""
        return xxhash.xxh3_64_intdigest(content, seed=(self.rule.seed << 8 | stream) % 2**64)

    def encode(
        self,
        contents: Sequence[bytes],
        fixed: npt.NDArray[np.bool_],
        encoder: Encoder,
        reference: Encoder,
        checks: Checks,
    ) -> Transformed:
        """Encode `contents`, transformed unless `fixed`, bool [documents]. Raises
        EncoderError as `Checks.run`."""
        # Complete documents and the pieces of cut documents are encoded in two calls.
        cuts = [None if keep else self.cut(c) for c, keep in zip(contents, fixed, strict=True)]
        pieces = [part for cut in cuts if cut for part in (cut.prefix, cut.middle, cut.suffix)]
        unchanged_contents = [b"" if cut else c for c, cut in zip(contents, cuts, strict=True)]
        encoded = encoder.encode_utf8(unchanged_contents)
        checks.run(encoder, reference, unchanged_contents, encoded)
        documents = np.split(encoded.tokens, np.cumsum(encoded.lengths)[:-1])
        # A piece that spells a beginning or an end of text is not one.
        encoded_pieces = encoder.encode_utf8(pieces, has_ends=False)
        piece_tokens = np.split(encoded_pieces.tokens, np.cumsum(encoded_pieces.lengths)[:-1])
        # A cut document was encoded as an empty text: its three pieces replace it.
        next_piece = 0
        for number, cut in enumerate(cuts):
            if cut is not None:
                parts = piece_tokens[next_piece : next_piece + 3]
                documents[number] = self._rearranged(cut.mode, parts, encoder)
                next_piece += 3
        return Transformed(
            Encoded(
                np.concatenate([encoded.tokens[:0], *documents]),
                np.fromiter(map(len, documents), np.int64, len(documents)),
            ),
            Counter(cut.mode for cut in cuts if cut),
        )

    def _rearranged(
        self, mode: Mode, parts: Sequence[npt.NDArray[np.integer[Any]]], encoder: Encoder
    ) -> npt.NDArray[np.int64]:
        """Return a document of `parts` (prefix, middle, suffix) in the order of `mode`. Its
        beginning and end occur once, also where the text spells them as tokens."""
        begin, end = [*encoder.beginning_ids], encoder.end_of_document_id
        assert end is not None
        part_ids = [part.tolist() for part in parts]
        if encoder.parse_special_tokens:
            filled = [number for number, part in enumerate(part_ids) if part]
            if filled and part_ids[filled[0]][: len(begin)] == begin:
                part_ids[filled[0]] = part_ids[filled[0]][len(begin) :]
            if filled and part_ids[filled[-1]][-1:] == [end]:
                part_ids[filled[-1]] = part_ids[filled[-1]][:-1]
        prefix, middle, suffix = part_ids
        prefix_id, suffix_id, middle_id = self.ids
        ordered = [[prefix_id], prefix, [suffix_id], suffix, [middle_id], middle]
        if mode == "spm":
            ordered = [[prefix_id, suffix_id], suffix, [middle_id], prefix, middle]
        return np.concatenate([begin, *ordered, [end]]).astype(np.int64)


@dataclass(frozen=True)
class Transformed:
    """Documents as tokens, and the number of rearranged documents, by mode."""

    encoded: Encoded
    modes: Counter[str] = field(default_factory=Counter)


def fill_in_middle(rule: FillInMiddleRecord | None, tokenizer: Tokenizer) -> FillInMiddle | None:
    """Return the transformation that `rule` asks for, with the tokenizer's tokens. Raises DataError
    if the tokenizer does not have them, or adds a space to each text, which would change a text
    that is encoded in parts."""
    if rule is None:
        return None
    # The tokens that are set, or the first known names that the tokenizer has.
    candidates = (rule.tokens,) if rule.tokens is not None else KNOWN_TOKENS
    names = next((names for names in candidates if len(tokenizer.ids_of(names)) == 3), None)
    if names is None:
        if rule.tokens is not None:
            missing = next(name for name in rule.tokens if not tokenizer.ids_of([name]))
            raise DataError(f"--fim-tokens {missing}: not a token of {tokenizer.name}")
        raise DataError(
            f"--fim-rate: tokenizer {tokenizer.name} has no tokens for fill-in-the-middle by the "
            f"names of other models, such as {' '.join(KNOWN_TOKENS[0])} -> name its own: "
            "--fim-tokens PREFIX SUFFIX MIDDLE; or add some: bigtrain tokenizer --base "
            "--add-special-token"
        )
    first, second, third = tokenizer.ids_of(names)
    if len({first, second, third}) < 3:
        raise DataError(f"--fim-tokens {' '.join(names)}: one token twice -> three tokens")
    # The parts of a text must encode to the tokens of the text.
    for probe in _PROBES:
        if not tokenizer.joins("a", probe):
            raise DataError(
                f"--fim-rate: tokenizer {tokenizer.name} encodes a text after another one as if it "
                "began anew (it writes a space before it), so that a document in three parts would "
                "be another text -> a byte-level tokenizer"
            )
    return FillInMiddle(rule, (first, second, third))
