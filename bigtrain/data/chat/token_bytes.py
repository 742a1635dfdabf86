"""Bytes of every token of a byte-level tokenizer, which map characters to tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenBytes:
    """Bytes of every token: `contents`, and their `sizes`, int64 [vocabulary].

    sums_prove: if the sizes of a text's tokens add up to its own, their bytes equal the text's.
    keeps_ascii: the same, only for ASCII text.
    """

    contents: Sequence[bytes]
    sizes: Integers
    sums_prove: bool
    keeps_ascii: bool


def token_bytes(tree: dict[str, Any]) -> TokenBytes | None:
    """Return the bytes of all tokens; None if they are not bytes of the text (``ByteLevel``)."""
    parts = {part["type"]: part for part in _steps(tree.get("pre_tokenizer"), "pretokenizers")}
    if "ByteLevel" not in parts or tree["model"]["type"] != "BPE":
        return None
    alphabet = _byte_alphabet()
    vocabulary: dict[str, int] = tree["model"]["vocab"]
    added = tree.get("added_tokens") or []
    contents = [b""] * (max([*vocabulary.values(), *(token["id"] for token in added)]) + 1)
    for token, number in vocabulary.items():
        contents[number] = bytes(alphabet[c] for c in token if c in alphabet)
    for token in added:
        contents[token["id"]] = token["content"].encode("utf-8")
    plain = not parts["ByteLevel"].get("add_prefix_space") and not any(
        token["lstrip"] or token["rstrip"] for token in added
    )
    normalizers = {part["type"] for part in _steps(tree.get("normalizer"), "normalizers")}
    return TokenBytes(
        contents,
        np.fromiter(map(len, contents), np.int64, len(contents)),
        sums_prove=plain and not normalizers,
        keeps_ascii=plain and normalizers <= {"NFC", "NFD", "NFKC", "NFKD"},
    )


def _steps(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return list(part[key]) if part["type"] == "Sequence" else [part]


def _byte_alphabet() -> dict[str, int]:
    """Return the characters that represent bytes in byte-level tokens (OpenAI's GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return alphabet | {chr(256 + number): byte for number, byte in enumerate(others)}
