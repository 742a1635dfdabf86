"""The fields of each request to an outer server, and their limits."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bigtrain.sites.server.messages import MOST_BYTES, MOST_HEADER_BYTES, Header

MOST_SITES, MOST_STEP, MOST_TOKENS = 1 << 16, 10**9, 10**15
"""Of one run; optimizer or outer steps; tokens of one delivery."""
_SMALL_BYTES = 64 << 10
_LONGEST_POLL_SECONDS = 3600.0

Site = Annotated[int, Field(ge=0, lt=MOST_SITES)]
Count = Annotated[int, Field(ge=0, le=MOST_STEP)]
Attempt = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
Run = Annotated[str, Field(pattern=r"^[0-9a-f]{0,32}$")]
Name = Annotated[str, Field(max_length=1000)]


class RefusedError(Exception):
    """A request that cannot be followed; its text goes to the site, and no more is done for it."""


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _OfSite(_Request):
    site: Site


class _Hello(_Request):
    site: Site | None = None


class _Wait(_Request):
    site: Site | None = None
    base: int = Field(ge=-1, le=MOST_STEP)
    seconds: float = Field(ge=0, le=_LONGEST_POLL_SECONDS)
    heard: Count | None = None


class _Join(_OfSite):
    run: Run = ""
    facts: dict[Name, Any]
    allowed: list[Name] = []
    sites: dict[Name, Any]
    parameters: list[Any]


class _Upload(_OfSite):
    boxes: list[Any]


class _Contribute(_OfSite):
    run: Run = ""
    attempt: Attempt
    rank: Annotated[int, Field(ge=0, lt=1_000_000)]
    part: Annotated[int, Field(ge=0, lt=1_000_000)]
    boxes: list[Any]


class _Deliver(_OfSite):
    run: Run = ""
    attempt: Attempt
    base: Count
    step: Count
    tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)]
    num_messages: Annotated[int, Field(ge=1, le=MOST_STEP)]
    heard: Count | None = None


class _Leave(_OfSite):
    run: Run = ""
    reason: Annotated[str, Field(max_length=500)] = ""


class _Weights(_OfSite):
    number: Count
    form: Literal["update", "full"]
    boxes: list[Any]


_REQUESTS: dict[str, type[_Request]] = {
    "hello": _Hello,
    "wait": _Wait,
    "join": _Join,
    "upload": _Upload,
    "uploaded": _OfSite,
    "contribute": _Contribute,
    "deliver": _Deliver,
    "leave": _Leave,
    "weights": _Weights,
}
_LARGE = {"upload", "contribute"}
_WITH_BOXES = {"join", "weights"}


def most_bytes(action: str) -> int:
    """Return the most bytes that the body of a request may have."""
    if action in _LARGE:
        return MOST_BYTES
    return MOST_HEADER_BYTES if action in _WITH_BOXES else _SMALL_BYTES


def is_large(action: str) -> bool:
    """Return whether a request, or its reply, may take much memory."""
    return action in _LARGE or action in _WITH_BOXES


def refuse_fields(action: str, header: Header) -> None:
    """Raise RefusedError, in one line, unless these are the fields of that request."""
    kind = _REQUESTS.get(action)
    if kind is None:
        raise RefusedError(f"no action {action[:40]!r}")
    try:
        kind.model_validate(header)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, one['loc']))[:100]} = {repr(one['input'])[:60]}: {one['msg']}"
            for one in error.errors()[:3]
        ]
        raise RefusedError("; ".join(problems)) from error
