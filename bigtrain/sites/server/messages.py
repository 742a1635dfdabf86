"""Messages between sites and an outer server: checked and signed bytes, of which nothing is
unpickled.

A body is 4 bytes ``BTO1``, the length of a header (uint32, little endian), the XXH3-64 of all that
follows (uint64), the header (JSON) and the bytes of tensors. A request and its reply are signed by
HMAC-SHA256 with the token that both sides know, which itself never travels. The signature of a
request covers method, path, the server's start, the sender's session and sequence number, and the
body's length and SHA-256: it is checked before any byte of the body is read. A number that was used
in a session is refused forever, and a session belongs to one start of the server.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

import xxhash

NONCE, SIGNATURE, INSTANCE = "x-bigtrain-nonce", "x-bigtrain-signature", "x-bigtrain-instance"
"""Names of HTTP headers: what is used once (``SESSION-SEQUENCE``, or random for the first message),
the signature, and which start of the server."""
DIGEST = "x-bigtrain-digest"
"""Name of the HTTP header with the body's SHA-256."""
MOST_HEADER_BYTES = 8 << 20
"""Of the header of a message, which names every parameter or rectangle."""
MOST_BYTES = (64 << 20) + MOST_HEADER_BYTES
"""Of a body: the elements of one exchange in float32, and a header."""
OK, CORRUPT, FORGED, REFUSED, TOO_LARGE, OTHER_START = 200, 400, 401, 409, 413, 412
LATER = 503
"""HTTP statuses of replies; after `LATER`, as after `CORRUPT`, a site tries again."""
_START = struct.Struct("<4sIQ")
_MAGIC = b"BTO1"
_DEEPEST = 32

Header = dict[str, Any]


class CorruptMessageError(ValueError):
    """Bytes that are not what was sent."""


def pack(header: Mapping[str, Any], payload: bytes | memoryview = b"") -> bytes:
    """The body of a message."""
    text = json.dumps(header).encode()
    digest = xxhash.xxh3_64(text)
    digest.update(payload)
    return b"".join([_START.pack(_MAGIC, len(text), digest.intdigest()), text, payload])


def unpack(body: bytes | bytearray) -> tuple[Header, memoryview]:
    """Header and payload of a body. Raises CorruptMessageError if they are not what was sent."""
    if len(body) < _START.size:
        raise CorruptMessageError(f"a message of {len(body)} bytes")
    magic, length, expected = _START.unpack_from(body)
    rest = memoryview(body)[_START.size :]
    if magic != _MAGIC or length > len(rest):
        raise CorruptMessageError("no message of this version of bigtrain")
    if length > MOST_HEADER_BYTES:
        raise CorruptMessageError(f"a header of {length} bytes, of at most {MOST_HEADER_BYTES}")
    if xxhash.xxh3_64_intdigest(rest) != expected:
        raise CorruptMessageError(f"checksum of {len(body)} bytes")
    return _decoded(bytes(rest[:length])), rest[length:]


def _decoded(text: bytes) -> Header:
    """The JSON object in `text`: finite numbers, nested no deeper than `_DEEPEST`."""
    try:
        header = json.loads(text, parse_constant=_refuse_number, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise CorruptMessageError(f"header: {str(error)[:200]}") from error
    if not isinstance(header, dict):
        raise CorruptMessageError("the header is no object")
    level: list[Any] = [header]
    for _ in range(_DEEPEST):
        nested = [one.values() if isinstance(one, dict) else one for one in level]
        level = [v for values in nested for v in values if isinstance(v, dict | list)]
    if level:
        raise CorruptMessageError(f"a header of more than {_DEEPEST} levels")
    return header


def _refuse_number(text: str) -> float:
    raise ValueError(f"{text[:40]} is no finite number")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse_number(text)


def digest_of(body: bytes | bytearray) -> str:
    """Return the SHA-256 of a body, as the header `DIGEST` has it."""
    return hashlib.sha256(body).hexdigest()


def request_signature(
    token: bytes, action: str, instance: str, nonce: str, length: int, digest: str
) -> str:
    """Return the signature of a request, which needs its headers only."""
    what = f"POST /{action}\n{instance}\n{length}\n{digest}"
    return sign(token, what, nonce, b"")


def one_line(text: str) -> str:
    """Return `text` with all that is not printable escaped: line breaks, control sequences, and
    characters that change the direction of others."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def escaping(say: Callable[[str], None]) -> Callable[[str], None]:
    """Return `say` for texts that hold what others have sent: each is one line (`one_line`)."""

    def say_one_line(text: str) -> None:
        say(one_line(text))

    return say_one_line


def sign(token: bytes, what: str, nonce: str, body: bytes) -> str:
    """The signature of a body. what: of a request all else that is signed, or the status of a
    reply; nonce: of the request."""
    mac = hmac.new(token, f"{what}\n{nonce}\n".encode(), hashlib.sha256)
    mac.update(body)
    return mac.hexdigest()


def is_equal(signature: str, other: str) -> bool:
    """Return whether two signatures are equal, in a time that does not depend on them."""
    return hmac.compare_digest(signature.encode(), other.encode())
