"""Bytes of the tokens of a byte-level tokenizer, which determine the characters of a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class TokenBytes:
    """Bytes of every token: `contents`, and their `sizes`, int64 [vocabulary]. sums_prove: tokens
    whose sizes add up to the size of a text have the bytes of the text. keeps_ascii: tokens have
    the bytes of an ASCII text, and maybe other bytes than any other text."""

    contents: Sequence[bytes]
    sizes: npt.NDArray[np.int64]
    sums_prove: bool
    keeps_ascii: bool


def token_bytes(tree: dict[str, Any]) -> TokenBytes | None:
    """Return the bytes of the vocabulary of a ``tokenizer.json``; None if tokens are not bytes of
    the text (``ByteLevel``)."""
    steps = {step["type"]: step for step in _steps(tree.get("pre_tokenizer"), "pretokenizers")}
    if "ByteLevel" not in steps or tree["model"]["type"] != "BPE":
        return None

    # The characters that represent bytes in byte-level tokens (OpenAI's GPT-2).
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet |= {chr(256 + number): byte for number, byte in enumerate(unprintable)}

    vocabulary: dict[str, int] = tree["model"]["vocab"]
    added_tokens = tree.get("added_tokens") or []
    contents = [b""] * (max([*vocabulary.values(), *(token["id"] for token in added_tokens)]) + 1)
    for token, token_id in vocabulary.items():
        contents[token_id] = bytes(alphabet[char] for char in token if char in alphabet)
    for token in added_tokens:
        contents[token["id"]] = token["content"].encode("utf-8")

    # A tokenizer that adds, strips or normalizes characters changes the bytes of a text.
    is_plain = not steps["ByteLevel"].get("add_prefix_space") and not any(
        token["lstrip"] or token["rstrip"] for token in added_tokens
    )
    normalizers = {step["type"] for step in _steps(tree.get("normalizer"), "normalizers")}
    return TokenBytes(
        contents,
        np.fromiter(map(len, contents), np.int64, len(contents)),
        sums_prove=is_plain and not normalizers,
        keeps_ascii=is_plain and normalizers <= {"NFC", "NFD", "NFKC", "NFKD"},
    )


def _steps(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer; a sequence has them under `key`."""
    if part is None:
        return []
    return list(part[key]) if part["type"] == "Sequence" else [part]
