"""JSON whose numbers and keys survive: integers of any size, no lost digits, no lost keys. Pure.

orjson reads an integer beyond 64 bits as a float, and the last of two equal keys, in silence. JSON
with either is parsed again: integers are exact, two equal keys of an object are an error, and a
number that a float cannot hold as it is written becomes an `InexactNumber`, which `dumps` refuses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from decimal import Decimal
from math import isfinite
from typing import Any

import orjson

_DIGITS_TO_ZEROS = bytes(ord("0" if byte in b"0123456789." else " ") for byte in range(256))
_MANY_DIGITS = b"0" * 16
"""A double holds every number of up to 15 digits."""
_KEY_END = b'":'
_SPACED_KEY_END = re.compile(rb'"[ \t\r\n]+:')
_BIG = b" "
"""First byte of a document of `dumps` with an integer beyond 64 bits, which orjson cannot read."""


class InexactNumber(float):
    """Number that is written with more digits than a float holds, or is not finite."""

    literal: str

    @classmethod
    def of(cls, literal: str) -> InexactNumber:
        number = cls(float(literal.replace("Infinity", "inf")))
        number.literal = literal
        return number


class DuplicateKeyError(ValueError):
    """Object with two equal keys, one of which would be dropped."""


def loads(content: bytes | str) -> Any:
    """Parse JSON, also with Python's NaN and Infinity. Raises ValueError for anything else, for
    bytes that are not UTF-8, and for two equal keys in an object."""
    raw = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    with suppress(ValueError, TypeError):  # TypeError: more levels than orjson writes
        tree = orjson.loads(content)
        # A key was dropped if fewer are written than read. White space after a key, and an escape,
        # make the counts differ, too: then the slow parser reads the content.
        has_long_numbers = _MANY_DIGITS in raw.translate(_DIGITS_TO_ZEROS)
        if not has_long_numbers and not _SPACED_KEY_END.search(raw):
            if raw.count(_KEY_END) == orjson.dumps(tree).count(_KEY_END):
                return tree
    try:
        return _DECODER.decode(content if isinstance(content, str) else content.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("too many levels of lists and objects") from error


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of keys and values. Raise DuplicateKeyError for two equal keys."""
    tree = dict(pairs)
    if len(tree) != len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise DuplicateKeyError(f"the key {duplicate!r} is there twice in one object -> keep one")
    return tree


def _number(literal: str) -> float:
    """Return the number of a literal; an `InexactNumber` if a float does not hold it."""
    number = float(literal)
    if isfinite(number) and Decimal(literal) == Decimal(repr(number)):
        return number
    return InexactNumber.of(literal)


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_float=_number, parse_constant=InexactNumber.of
)


def dumps(tree: Any) -> bytes:
    """Return `tree` as JSON that `read_document` reads. Raises TypeError for a value that JSON
    does not have, and for an `InexactNumber`."""
    try:
        return orjson.dumps(tree)
    except TypeError as error:
        for number in _inexact_numbers(tree):
            raise TypeError(
                f"the number {number.literal} would be changed: a float does not hold it -> write "
                "it as text, or with fewer digits"
            ) from error
        try:
            text = json.dumps(tree, ensure_ascii=False, separators=(",", ":"))
            return _BIG + text.encode("utf-8")
        except (TypeError, ValueError):
            raise error from None


def read_document(content: bytes) -> Any:
    """Parse a document of `dumps`."""
    return json.loads(content) if content.startswith(_BIG) else orjson.loads(content)


def joined_documents(**parts: bytes) -> bytes:
    """Return the JSON object with the documents `parts`, each by `dumps`, as values."""
    has_big_integer = any(part.startswith(_BIG) for part in parts.values())
    prefix = _BIG if has_big_integer else b""
    members = b",".join(b'"%b":%b' % (key.encode(), part) for key, part in parts.items())
    return prefix + b"{%b}" % members


def _inexact_numbers(tree: Any) -> Iterator[InexactNumber]:
    """Yield the inexact numbers in `tree`."""
    if isinstance(tree, InexactNumber):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        items = tree.values() if isinstance(tree, dict) else tree
        for item in items:
            yield from _inexact_numbers(item)
