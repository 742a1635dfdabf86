"""Wire format between sites and an outer server: signed messages with checksums, and the fields of
each request.

A body is 4 bytes ``BTO2``, the length of a header (uint32, little endian), the XXH3-64 of all that
follows (uint64), the header (JSON) and a payload. Nothing is unpickled. A request and its reply are
signed by HMAC-SHA256 with the token, which itself is never sent. The signature of a request covers
method, path, the server's start, the sender's session and sequence number, and the body's length
and SHA-256: it is checked before any byte of the body is read. A number that was used in a session
is refused forever, and a session belongs to one start of the server.

Requests (``POST /ACTION``) of both ways to exchange: ``hello``, ``join``, ``heartbeat``, ``leave``.
Exchange ``server``, where the server holds the weights: ``upload``, ``uploaded`` (initial weights),
``contribute`` (a part of a site's change), ``deliver`` (all parts were sent), ``wait``,
``weights``. Exchange ``direct``, where sites connect to each other: ``layout``, ``layout_of``,
``enter`` (the site is at an outer step), ``plan`` (who takes part: `RoundPlan`), ``put``, ``get``
(addresses of ranks), ``vote`` (the site's transfers are done), ``verdict`` (the round counts).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bigtrain.sites.metrics import OuterEvent

NONCE, SIGNATURE, INSTANCE = "x-bigtrain-nonce", "x-bigtrain-signature", "x-bigtrain-instance"
"""HTTP headers: a value that is used once (``SESSION-SEQUENCE``, random for the first message),
the signature, and the id of the server's start."""
DIGEST = "x-bigtrain-digest"
"""HTTP header with the body's SHA-256."""
MOST_HEADER_BYTES = 8 << 20
"""Limit of a message's header, which names every parameter or rectangle."""
MOST_BYTES = (64 << 20) + MOST_HEADER_BYTES
"""Limit of a body: the elements of one exchange in float32, and a header."""
MOST_VALUE_BYTES = 64 << 10
"""Limit of a value of ``put``."""
MOST_SITES, MOST_STEP, MOST_TOKENS = 1 << 16, 10**9, 10**15
"""Limits: sites of one run; optimizer or outer steps; tokens of one contribution."""
OK, CORRUPT, FORGED, REFUSED, TOO_LARGE, OTHER_START = 200, 400, 401, 409, 413, 412
LATER = 503
"""HTTP statuses of replies; after `LATER` and `CORRUPT` a site retries."""
HEARTBEAT_SECONDS, HEARTBEAT_TIMEOUT = 2.0, 15.0
"""Seconds between two heartbeats of a site, and from the last one until the site counts as lost."""
LONGEST_POLL_SECONDS = 20.0
"""Longest time that the server keeps a request (``wait``, ``plan``, ``verdict``, ``get``)."""
_START = struct.Struct("<4sIQ")
_MAGIC = b"BTO2"
_MAX_DEPTH = 32
_SMALL_BYTES = 64 << 10
_LONGEST_SECONDS = 1e7

Header = dict[str, Any]


class CorruptMessageError(ValueError):
    """Bytes that differ from what was sent."""


class RefusedError(Exception):
    """A request that cannot be followed; the site gets its text, and the state is unchanged."""


# Bodies


def pack(header: Mapping[str, Any], payload: bytes | memoryview = b"") -> bytes:
    """Return the body of a message."""
    text = json.dumps(header).encode()
    digest = xxhash.xxh3_64(text)
    digest.update(payload)
    return b"".join([_START.pack(_MAGIC, len(text), digest.intdigest()), text, payload])


def unpack(body: bytes | bytearray) -> tuple[Header, memoryview]:
    """Return header and payload of a body. Raises CorruptMessageError."""
    if len(body) < _START.size:
        raise CorruptMessageError(f"a message of {len(body)} bytes")
    magic, length, expected = _START.unpack_from(body)
    rest = memoryview(body)[_START.size :]
    if magic != _MAGIC or length > len(rest):
        raise CorruptMessageError("not a message of this version of bigtrain")
    if length > MOST_HEADER_BYTES:
        raise CorruptMessageError(f"a header of {length} bytes, of at most {MOST_HEADER_BYTES}")
    if xxhash.xxh3_64_intdigest(rest) != expected:
        raise CorruptMessageError(f"checksum of {len(body)} bytes")
    return _decode_header(bytes(rest[:length])), rest[length:]


def _decode_header(text: bytes) -> Header:
    """Return the JSON object in `text`: finite numbers, nested no deeper than `_MAX_DEPTH`."""
    try:
        header = json.loads(text, parse_constant=_refuse_number, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise CorruptMessageError(f"header: {str(error)[:200]}") from error
    if not isinstance(header, dict):
        raise CorruptMessageError("the header is not an object")
    level: list[Any] = [header]
    for _ in range(_MAX_DEPTH):
        nested = [one.values() if isinstance(one, dict) else one for one in level]
        level = [v for values in nested for v in values if isinstance(v, dict | list)]
    if level:
        raise CorruptMessageError(f"a header of more than {_MAX_DEPTH} levels")
    return header


def _refuse_number(text: str) -> float:
    raise ValueError(f"{text[:40]} is not a finite number")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse_number(text)


# Signatures and log lines


def digest_of(body: bytes | bytearray) -> str:
    """Return the SHA-256 of a body, or of a layout document."""
    return hashlib.sha256(body).hexdigest()


def request_signature(
    token: bytes, action: str, instance: str, nonce: str, length: int, digest: str
) -> str:
    """Return the signature of a request, which needs its headers only."""
    return sign(token, f"POST /{action}\n{instance}\n{length}\n{digest}", nonce, b"")


def sign(token: bytes, subject: str, nonce: str, body: bytes) -> str:
    """Return the signature of a body. subject: all else that is signed of a request, or the status
    of a reply; nonce: of the request."""
    mac = hmac.new(token, f"{subject}\n{nonce}\n".encode(), hashlib.sha256)
    mac.update(body)
    return mac.hexdigest()


def is_equal(signature: str, other: str) -> bool:
    """Return whether two signatures are equal, in a time that does not depend on them."""
    return hmac.compare_digest(signature.encode(), other.encode())


def one_line(text: str) -> str:
    """Return `text` with all that is not printable escaped: line breaks, control sequences, and
    characters that change the direction of others."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def escaping(say: Callable[[str], None]) -> Callable[[str], None]:
    """Return `say` for texts that include what others have sent: each is one line (`one_line`). A
    log that cannot be written, as on a full disk, stops nothing."""

    def say_one_line(text: str) -> None:
        with suppress(OSError):
            say(one_line(text))

    return say_one_line


# Fields of the requests

Site = Annotated[int, Field(ge=0, lt=MOST_SITES)]
Count = Annotated[int, Field(ge=0, le=MOST_STEP)]
Tokens = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
Id = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
RunId = Annotated[str, Field(pattern=r"^[0-9a-f]{0,32}$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{16,64}$")]
Name = Annotated[str, Field(max_length=1000)]
Rank = Annotated[int, Field(ge=0, lt=1_000_000)]
Seconds = Annotated[float, Field(ge=0, le=_LONGEST_SECONDS)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _SiteRequest(_Request):
    site: Site
    run: RunId = ""  # id of the run directory: another one with the same index is refused


class _Hello(_Request):
    site: Site | None = None


class JoinRequest(_SiteRequest):
    """A site that begins, or is back.

    facts: settings and data that all sites must have alike; allowed: those of them that this site
    may change. sites: settings of the outer optimizer. parameters: names and shapes. number: of its
    last outer step; is_new: whether it has no checkpoint. Of the direct exchange: layout (SHA-256
    of the layout document), plain (parameters that it sends in float32 in any case).

    Reply: the run's state (as of ``wait``), ``window_seconds``, ``heartbeat_seconds``,
    ``is_asynchronous``, ``uploads`` (the server asks this site for the initial weights),
    ``needs_layout`` (it has no document of that digest yet).
    """

    facts: dict[Name, Any]
    allowed: list[Name] = []
    sites: dict[Name, Any]
    parameters: list[Any]
    exchange: Literal["server", "direct"] = "server"
    number: Count = 0
    is_new: bool = False
    timeout_seconds: Annotated[float, Field(gt=0, le=_LONGEST_SECONDS)] = 600.0
    layout: Digest | None = None
    plain: list[Name] = []


class _Leave(_SiteRequest):
    reason: Annotated[str, Field(max_length=500)] = ""


class _Wait(_Request):
    """Poll for the state of the run after an outer step later than `base`."""

    site: Site | None = None
    run: RunId = ""
    base: int = Field(ge=-1, le=MOST_STEP)
    seconds: Seconds
    heard: Count | None = None


class _Upload(_SiteRequest):
    boxes: list[Any]


class _Contribute(_SiteRequest):
    attempt: Id
    rank: Rank
    part: Rank
    boxes: list[Any]


class _Deliver(_SiteRequest):
    attempt: Id
    base: Count
    step: Count
    tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)]
    num_messages: Annotated[int, Field(ge=1, le=MOST_STEP)]
    heard: Count | None = None


class _Weights(_SiteRequest):
    number: Count
    form: Literal["update", "full"]
    boxes: list[Any]


class _LayoutOf(_SiteRequest):
    of_site: Site


class RoundEntry(_SiteRequest):
    """A site that is at an outer step; the same `entry` again changes nothing. Reply: empty.

    entry: random. number: of its last outer step; step: its optimizer steps; fragment: that it
    would exchange, None if it only takes weights (at the begin); tokens: trained on since that
    fragment's last exchange; digest: of its global weights; tokens_seen: by those, on all sites.
    """

    entry: Id
    number: Count
    step: Count
    fragment: Annotated[int, Field(ge=0, lt=1_000_000)] | None
    tokens: Tokens
    digest: Digest
    tokens_seen: Annotated[int, Field(ge=0)]


class _Plan(_SiteRequest):
    """Poll for the `RoundPlan` of an entry.

    Reply: ``is_ready`` and, if so, ``plan`` (`RoundPlan.to_json`). If not: ``is_known`` (False:
    the server has restarted, enter again), ``missing`` (sites that are waited for),
    ``refused`` (by such a site, why its last join was), ``is_new`` (a new run, for which all sites
    are waited for without a limit).
    """

    entry: Id
    seconds: Seconds


class _Vote(_SiteRequest):
    """The result of a site's transfers; the first one of a site counts. unusable: the site that
    sent values which this one cannot use. Reply: empty."""

    attempt: Id
    is_done: bool
    unusable: Site | None = None


class _Verdict(_SiteRequest):
    """Poll for the decision on an attempt. Reply: ``is_decided``, ``is_committed``."""

    attempt: Id
    seconds: Seconds


class _Put(_SiteRequest):
    """Store the payload under a key, until the members' `generation` changes."""

    generation: Id
    key: Name


class _Get(_Put):
    """Poll for a value. Reply: ``is_there``, and the value as payload."""

    seconds: Seconds


_REQUESTS: dict[str, type[_Request]] = {
    "hello": _Hello,
    "join": JoinRequest,
    "heartbeat": _SiteRequest,
    "leave": _Leave,
    "upload": _Upload,
    "uploaded": _SiteRequest,
    "contribute": _Contribute,
    "deliver": _Deliver,
    "wait": _Wait,
    "weights": _Weights,
    "layout": _SiteRequest,
    "layout_of": _LayoutOf,
    "enter": RoundEntry,
    "plan": _Plan,
    "vote": _Vote,
    "verdict": _Verdict,
    "put": _Put,
    "get": _Get,
}
POLLS = frozenset({"wait", "plan", "verdict", "get"})
"""Requests that the server may keep for a while."""
_WITH_TENSORS = {"upload", "contribute", "layout"}
_WITH_BOXES = {"join", "weights"}
_WITH_VALUE = {"put"}


def most_bytes(action: str) -> int:
    """Return the limit of the body of a request."""
    if action in _WITH_TENSORS:
        return MOST_BYTES
    if action in _WITH_BOXES:
        return MOST_HEADER_BYTES
    return _SMALL_BYTES + (MOST_VALUE_BYTES if action in _WITH_VALUE else 0)


def is_large(action: str) -> bool:
    """Return whether a request, or its reply, may take much memory."""
    return action in _WITH_TENSORS or action in _WITH_BOXES or action == "layout_of"


def refuse_fields(action: str, header: Header) -> None:
    """Raise RefusedError, in one line, unless `header` has the fields of that request."""
    kind = _REQUESTS.get(action)
    if kind is None:
        raise RefusedError(f"unknown action {action[:40]!r}")
    try:
        kind.model_validate(header)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, one['loc']))[:100]} = {repr(one['input'])[:60]}: {one['msg']}"
            for one in error.errors()[:3]
        ]
        raise RefusedError("; ".join(problems)) from error


@dataclass(frozen=True)
class RoundPlan:
    """Members of an attempt at an outer step of the direct exchange, and their parts in it.

    generation: of the groups of ranks, which must be opened again when it changes. members: all
    that exchange, ascending, with `weights` in the mean, 0 for the `takers`, which first take the
    global weights of `donor`. fragment: None where weights are only taken. number, tokens_seen:
    after the round; step: of the sites that give the mean. layouts: digests by site. plain:
    parameters that every site sends in float32. digests: of the global weights by site, if sites of
    a new run differ in them: every site ends then.
    """

    attempt: str
    generation: str
    members: tuple[int, ...]
    weights: tuple[int, ...]
    takers: tuple[int, ...]
    donor: int
    fragment: int | None
    number: int
    step: int
    tokens_seen: int
    layouts: Mapping[int, str]
    plain: tuple[str, ...]
    events: tuple[OuterEvent, ...]
    digests: Mapping[int, str]

    @property
    def sites(self) -> tuple[int, ...]:
        """Sites whose weights are in the mean."""
        return tuple(s for s, w in zip(self.members, self.weights, strict=True) if w)

    def to_json(self) -> Header:
        """Return the plan as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> RoundPlan:
        """Return the plan of a reply."""
        tuples = ("members", "weights", "takers", "plain")
        by_site = ("layouts", "digests")
        return cls(
            **{
                **tree,
                **{key: tuple(tree[key]) for key in tuples},
                **{key: {int(site): text for site, text in tree[key].items()} for key in by_site},
                "events": tuple(OuterEvent(**one) for one in tree["events"]),
            }
        )
