"""Wire format between sites and an outer server: signed messages with checksums, and the fields of
each request.

A body is 4 bytes ``BTO2``, the length of a header (uint32, little endian), the XXH3-64 of all that
follows (uint64), the header (JSON) and a payload. Nothing is unpickled. A request and its reply are
signed by HMAC-SHA256 with the token, which itself is never sent. The signature of a request covers
method, path, the server's start, the sender's session and sequence number, and the body's length
and SHA-256: it is checked before any byte of the body is read. A number that was used in a session
is refused forever, and a session belongs to one start of the server.

Requests are ``POST /ACTION`` (`REQUESTS`): ``hello`` to ``leave`` of both ways to exchange,
``upload`` to ``weights`` of ``server``, where the server holds the weights, and ``layout`` to
``get`` of ``direct``, where sites connect to each other.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal

import xxhash
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from bigtrain.sites.metrics import OuterEvent

NONCE, SIGNATURE = "x-bigtrain-nonce", "x-bigtrain-signature"
INSTANCE, DIGEST = "x-bigtrain-instance", "x-bigtrain-digest"
"""HTTP headers: a value that is used once (``SESSION-SEQUENCE``, random for the first message), the
signature, the id of the server's start, and the body's SHA-256."""
MOST_HEADER_BYTES, MOST_VALUE_BYTES = 8 << 20, 64 << 10
MOST_BYTES = (64 << 20) + MOST_HEADER_BYTES
"""Limits: of a header, which names every parameter or rectangle; of a value of ``put``; and of a
body, with the elements of one exchange in float32."""
MOST_SITES, MOST_STEP, MOST_TOKENS = 1 << 16, 10**9, 10**15
"""Limits: sites of one run; optimizer or outer steps; tokens of one contribution."""
MOST_PARAMETERS, MOST_RECTANGLES = 100_000, 100_000
"""Limits: parameters of a model, and rectangles of one message. The largest mixtures of experts
have 70,000 parameters, with one for each matrix of an expert."""
_MOST_SEPARATORS = 1_000_000
"""Limit of brackets and commas of a header, each of which is about one value: a million values take
0.5 s and 90 MiB to decode."""
OK, CORRUPT, FORGED, REFUSED, TOO_LARGE, OTHER_START = 200, 400, 401, 409, 413, 412
LATER = 503
"""HTTP statuses of replies; after `LATER` and `CORRUPT` a site retries."""
HEARTBEAT_SECONDS, HEARTBEAT_TIMEOUT = 2.0, 15.0
"""Seconds between two heartbeats of a site, and from the last one until the site counts as lost."""
LONGEST_POLL_SECONDS = 20.0
"""Longest time that the server keeps a request (``wait``, ``plan``, ``verdict``, ``get``)."""
_PREFIX = struct.Struct("<4sIQ")  # magic bytes, bytes of the header, checksum
_MAGIC = b"BTO2"
_MAX_DEPTH = 32
_SMALL_BODY_BYTES = 64 << 10
_LONGEST_SECONDS = 1e7
_LONGEST_NAME, _MOST_DIMENSIONS, _LARGEST_SIZE = 1000, 8, 1 << 48

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
    return b"".join([_PREFIX.pack(_MAGIC, len(text), digest.intdigest()), text, payload])


def unpack(
    body: bytes | bytearray, most_header_bytes: int = MOST_HEADER_BYTES
) -> tuple[Header, memoryview]:
    """Return header and payload of a body. Raises CorruptMessageError."""
    if len(body) < _PREFIX.size:
        raise CorruptMessageError(f"a message of {len(body)} bytes")
    magic, header_bytes, checksum = _PREFIX.unpack_from(body)
    content = memoryview(body)[_PREFIX.size :]
    if magic != _MAGIC or header_bytes > len(content):
        raise CorruptMessageError("not a message of this version of bigtrain")
    if header_bytes > most_header_bytes:
        raise CorruptMessageError(
            f"a header of {header_bytes} bytes, of at most {most_header_bytes}"
        )
    if xxhash.xxh3_64_intdigest(content) != checksum:
        raise CorruptMessageError(f"checksum of {len(body)} bytes")
    return _decode_header(bytes(content[:header_bytes])), content[header_bytes:]


def _decode_header(text: bytes) -> Header:
    """Return the JSON object in `text`: finite numbers, nested no deeper than `_MAX_DEPTH`."""
    num_values = sum(map(text.count, (b"[", b"{", b",")))
    if num_values > _MOST_SEPARATORS:
        raise CorruptMessageError(
            f"a header of {num_values:,} values, of at most {_MOST_SEPARATORS:,}"
        )
    try:
        header = json.loads(text, parse_constant=_parse_finite, parse_float=_parse_finite)
    except (ValueError, RecursionError) as error:
        raise CorruptMessageError(f"header: {str(error)[:200]}") from error
    if not isinstance(header, dict):
        raise CorruptMessageError("the header is not an object")
    # Replace the containers of a level by the containers inside them, once per permitted level.
    containers: list[Any] = [header]
    for _ in range(_MAX_DEPTH):
        nested = [value.values() if isinstance(value, dict) else value for value in containers]
        containers = [v for values in nested for v in values if isinstance(v, dict | list)]
    if containers:
        raise CorruptMessageError(f"a header of more than {_MAX_DEPTH} levels")
    return header


def _parse_finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:40]} is not a finite number")
    return number


# Signatures and log lines


def digest_of(body: bytes | bytearray | memoryview) -> str:
    """Return the SHA-256 of a body, or of a layout document."""
    return hashlib.sha256(body).hexdigest()


def request_signature(
    token: bytes, action: str, instance: str, nonce: str, length: int, digest: str
) -> str:
    """Return the signature of a request, which needs its headers only."""
    return sign(token, f"POST /{action}\n{instance}\n{length}\n{digest}", nonce, b"")


def sign(token: bytes, subject: str, nonce: str, body: bytes) -> str:
    """Return the signature of a body. subject: the signed headers of a request, or the status of a
    reply; nonce: of the request."""
    mac = hmac.new(token, f"{subject}\n{nonce}\n".encode(), hashlib.sha256)
    mac.update(body)
    return mac.hexdigest()


def is_equal(signature: str, expected: str) -> bool:
    """Return whether two signatures are equal, in a time that does not depend on their content."""
    return hmac.compare_digest(signature.encode(), expected.encode())


def one_line_log(log: Callable[[str], None]) -> Callable[[str], None]:
    """Return `log` for texts with parts that strangers have sent: it writes each text as one line,
    with escapes for characters that are not printable. A log that cannot be written, as on a full
    disk, stops nothing."""

    def log_one_line(text: str) -> None:
        escaped = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
        with suppress(OSError):
            log("".join(escaped))

    return log_one_line


# Fields of the requests

Site = Annotated[int, Field(ge=0, lt=MOST_SITES)]
Count = Annotated[int, Field(ge=0, le=MOST_STEP)]
Tokens = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
Id = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
RunId = Annotated[str, Field(pattern=r"^[0-9a-f]{1,32}$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{16,64}$")]
Name = Annotated[str, Field(max_length=_LONGEST_NAME)]
Rank = Annotated[int, Field(ge=0, lt=1_000_000)]
Seconds = Annotated[float, Field(ge=0, le=_LONGEST_SECONDS)]
Rectangles = Annotated[list[Any], Field(max_length=MOST_RECTANGLES)]
"""JSON of `ParameterBox`."""


def _checked_parameters(entries: list[Any]) -> list[Any]:
    """Return `entries`. Raises ValueError unless each is the name and the shape of a parameter."""
    for entry in entries:
        is_valid = False
        match entry:
            case [str(name), [*sizes]]:
                is_valid = len(name) <= _LONGEST_NAME and len(sizes) <= _MOST_DIMENSIONS
                # By `type`, since a bool is an instance of int.
                is_valid &= all(type(size) is int and 0 < size < _LARGEST_SIZE for size in sizes)
        if not is_valid:
            raise ValueError(f"not the name and shape of a parameter: {repr(entry)[:100]}")
    return entries


Parameters = Annotated[
    list[Any], Field(max_length=MOST_PARAMETERS), AfterValidator(_checked_parameters)
]
"""Names and shapes."""


class Request(BaseModel):
    """Fields of a request. most_bytes: limit of the body; most_header_bytes: of the header."""

    model_config = ConfigDict(extra="forbid", strict=True)
    most_bytes: ClassVar[int] = _SMALL_BODY_BYTES
    most_header_bytes: ClassVar[int] = _SMALL_BODY_BYTES


class SiteRequest(Request):
    """Request that only a site makes. site: its sender. run: id of the site's run directory, which
    every request names, for a second run with this index is refused."""

    site: Site
    run: RunId


class JoinRequest(SiteRequest):
    """A site that begins, or is back.

    facts: settings and data that all sites must have alike; allowed: facts that this site may
    change. sites: settings of the outer optimizer. parameters: names and shapes; None: the site
    only asks whether it may join, before it builds the model. number: the site's last outer step;
    is_new: whether it has no checkpoint. For the direct exchange only: layout (SHA-256 of the
    layout document), plain (parameters that the site sends in float32, whatever the codec).

    Reply: the run's state (as the reply to ``wait``), ``window_seconds``, ``is_asynchronous``,
    ``uploads`` (the server asks this site for the initial weights), ``needs_layout`` (the server
    has no layout document with this digest).
    """

    most_bytes = most_header_bytes = MOST_HEADER_BYTES

    facts: dict[Name, Any]
    allowed: list[Name] = []
    sites: dict[Name, Any]
    parameters: Parameters | None
    exchange: Literal["server", "direct"] = "server"
    number: Count = 0
    is_new: bool = False
    timeout_seconds: Annotated[float, Field(gt=0, le=_LONGEST_SECONDS)] = 600.0
    layout: Digest | Literal[""] = ""
    plain: list[Name] = []


class LeaveRequest(SiteRequest):
    """A site that ends. reason: why its change cannot be used, if it ends for that."""

    reason: Annotated[str, Field(max_length=500)] = ""


class WaitRequest(SiteRequest):
    """Poll for the state of the run after an outer step later than `base`, with the events since
    outer step `heard` (None: the events of the last outer step)."""

    base: int = Field(ge=-1, le=MOST_STEP)
    seconds: Seconds
    heard: Count | None = None


class UploadRequest(SiteRequest):
    """Rectangles of the initial weights; payload: float32."""

    most_bytes = MOST_BYTES
    most_header_bytes = MOST_HEADER_BYTES

    boxes: Rectangles


class ContributeRequest(UploadRequest):
    """A part of a site's change; payload: codes."""

    attempt: Id
    rank: Rank
    part: Rank


class DeliverRequest(SiteRequest):
    """End of a site's change: `num_messages` from all ranks, relative to outer step `base`, after
    `step` of the run's `last_step` optimizer steps, trained on `tokens`."""

    attempt: Id
    base: Count
    step: Count
    last_step: Count
    tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)]
    num_messages: Annotated[int, Field(ge=1, le=MOST_STEP)]
    heard: Count | None = None


class WeightsRequest(SiteRequest):
    """Rectangles of the global weights of outer step `number`. Reply: ``form``, and the last update
    encoded, or the full weights in float32."""

    most_bytes = most_header_bytes = MOST_HEADER_BYTES

    number: Count
    form: Literal["update", "full"]
    boxes: Rectangles


class LayoutRequest(SiteRequest):
    """The layout document of a site, as payload."""

    most_bytes = MOST_BYTES


class LayoutOfRequest(SiteRequest):
    """Ask for the layout document of another site."""

    of_site: Site


class RoundEntry(SiteRequest):
    """A site that is at an outer step, and polls for its `RoundPlan`; a repeated `entry` changes
    nothing.

    entry: random. number: the site's last outer step; step: its optimizer steps, of the run's
    last_step; fragment: that it would exchange, None if it only takes weights (at the begin);
    is_last: whether it exchanges nothing after it; tokens: trained on since that fragment's last
    exchange; digest: of the site's global weights; tokens_seen: by these weights, on all sites.

    Reply: ``is_ready`` and, if so, ``plan``. If not: ``missing`` (sites that are waited for),
    ``refused`` (by missing site, why its last join was refused), ``is_new`` (a new run, for which
    all sites are waited for without a limit).
    """

    entry: Id
    number: Count
    step: Count
    last_step: Count
    fragment: Annotated[int, Field(ge=0, lt=1_000_000)] | None
    is_last: bool
    tokens: Tokens
    digest: Digest
    tokens_seen: Annotated[int, Field(ge=0)]
    seconds: Seconds = 0.0


class VoteRequest(SiteRequest):
    """The result of a site's transfers, and a poll for the decision on the attempt; the first vote
    of a site counts. unusable: the site that sent values which this one cannot use. Reply:
    ``is_decided``, ``is_committed``."""

    attempt: Id
    is_done: bool
    unusable: Site | None = None
    seconds: Seconds = 0.0


class PutRequest(SiteRequest):
    """Store the payload under a key, until the members' `generation` changes."""

    most_bytes = _SMALL_BODY_BYTES + MOST_VALUE_BYTES

    generation: Id
    key: Name


class GetRequest(SiteRequest):
    """Poll for a value. Reply: ``is_there``, and the value as payload."""

    generation: Id
    key: Name
    seconds: Seconds


REQUESTS: dict[str, type[Request]] = {
    "hello": Request,
    "join": JoinRequest,
    "heartbeat": SiteRequest,
    "leave": LeaveRequest,
    "upload": UploadRequest,
    "uploaded": SiteRequest,
    "contribute": ContributeRequest,
    "deliver": DeliverRequest,
    "wait": WaitRequest,
    "weights": WeightsRequest,
    "layout": LayoutRequest,
    "layout_of": LayoutOfRequest,
    "enter": RoundEntry,
    "vote": VoteRequest,
    "put": PutRequest,
    "get": GetRequest,
}
POLLS = frozenset({"wait", "enter", "vote", "get"})
"""Requests that the server may keep for a while."""


def parse_request(action: str, header: Header) -> Request:
    """Return the fields of a request. Raises RefusedError, whose text is one line, for an unknown
    action and for wrong fields."""
    request_type = REQUESTS.get(action)
    if request_type is None:
        raise RefusedError(f"unknown action {action[:40]!r}")
    try:
        return request_type.model_validate(header)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, problem['loc']))[:100]} = {repr(problem['input'])[:60]}: "
            f"{problem['msg']}"
            for problem in error.errors()[:3]
        ]
        raise RefusedError("; ".join(problems)) from error


class StepRecord(BaseModel):
    """An outer step that counts, as the server stores and sends it, with more fields that sites
    ignore.

    number: of the outer step; tokens_seen: trained into the global weights after it (0 where the
    server holds the weights). step: optimizer step of the `sites` in the mean. ended_step: the
    run's last step, if the run ends with this outer step; else 0. fragment: the part of the model
    that was averaged, None if sites only took weights. members: sites that exchanged directly,
    including sites that took weights. distances: by site, to the mean, if the server computes
    the mean.
    """

    model_config = ConfigDict(frozen=True)

    number: int = 0
    step: int = 0
    ended_step: int = 0
    tokens_seen: int = 0
    fragment: int | None = None
    sites: tuple[int, ...] = ()
    members: tuple[int, ...] = ()
    distances: dict[str, float] | None = None
    events: tuple[OuterEvent, ...] = ()


class RoundPlan(StepRecord):
    """Plan of a round of the direct exchange: the outer step that all members record if every
    member votes for it.

    generation: id of the groups of ranks, which are opened again when it changes. members: sites,
    ascending. weights: of the members in the mean, 0 for the `takers`, which first take the global
    weights of the site `donor`. layouts: digests by site. plain: parameters that every site sends
    in float32. refusal: why the members make no round: every member ends then.
    """

    attempt: str = ""
    generation: str = ""
    weights: tuple[int, ...]
    takers: tuple[int, ...] = ()
    donor: int
    layouts: dict[int, str] = {}
    plain: tuple[str, ...]
    refusal: str = ""
