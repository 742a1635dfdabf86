"""Messages between sites and an outer server: checked and signed bytes, of which nothing is
unpickled.

A body is 4 bytes ``BTO1``, the length of a header (uint32, little endian), the XXH3-64 of all that
follows (uint64), the header (JSON) and the bytes of tensors. A request and its reply are signed by
HMAC-SHA256 with the token that both sides know, which itself never travels; the signature covers
what is asked, a number that is used once, and the server's start, so that an old message does
nothing when it is sent again.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from collections.abc import Mapping
from typing import Any

import xxhash

NONCE, SIGNATURE, INSTANCE = "x-bigtrain-nonce", "x-bigtrain-signature", "x-bigtrain-instance"
"""Names of HTTP headers: the number used once, the signature, and which start of the server."""
MOST_BYTES = (64 << 20) + (8 << 20)
"""Of a body: the elements of one exchange in float32, and a header."""
OK, CORRUPT, FORGED, REFUSED, TOO_LARGE, OTHER_START = 200, 400, 401, 409, 413, 412
"""HTTP statuses of replies."""
_START = struct.Struct("<4sIQ")
_MAGIC = b"BTO1"

Header = dict[str, Any]


class CorruptMessageError(ValueError):
    """Bytes that are not what was sent."""


def pack(header: Mapping[str, Any], payload: bytes | memoryview = b"") -> bytes:
    """The body of a message."""
    text = json.dumps(header).encode()
    digest = xxhash.xxh3_64(text)
    digest.update(payload)
    return b"".join([_START.pack(_MAGIC, len(text), digest.intdigest()), text, payload])


def unpack(body: bytes) -> tuple[Header, memoryview]:
    """Header and payload of a body. Raises CorruptMessageError if they are not what was sent."""
    if len(body) < _START.size:
        raise CorruptMessageError(f"a message of {len(body)} bytes")
    magic, length, expected = _START.unpack_from(body)
    rest = memoryview(body)[_START.size :]
    if magic != _MAGIC or length > len(rest):
        raise CorruptMessageError("no message of this version of bigtrain")
    if xxhash.xxh3_64_intdigest(rest) != expected:
        raise CorruptMessageError(f"checksum of {len(body)} bytes")
    try:
        header = json.loads(bytes(rest[:length]))
    except ValueError as error:
        raise CorruptMessageError(f"header: {error}") from error
    if not isinstance(header, dict):
        raise CorruptMessageError("the header is no object")
    return header, rest[length:]


def sign(token: bytes, what: str, nonce: str, body: bytes) -> str:
    """The signature of a body. what: the action of a request and the server's instance, or the
    status of a reply; nonce: of the request."""
    mac = hmac.new(token, f"{what}\n{nonce}\n".encode(), hashlib.sha256)
    mac.update(body)
    return mac.hexdigest()


def is_signed(token: bytes, what: str, nonce: str, body: bytes, signature: str) -> bool:
    """Whether `signature` is that of `sign`."""
    return hmac.compare_digest(sign(token, what, nonce, body).encode(), signature.encode())
