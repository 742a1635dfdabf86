"""Addresses: detection, parts, and a form without credentials. Pure."""

from __future__ import annotations

import re
from urllib.parse import unquote

ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*(::|://)", re.IGNORECASE)
_USER = re.compile(r"(?<=://)[^/@\s'\"?#]*@")
_SECRET_NAME = (
    r"[^=&?#\s'\"]*(?:sig|token|secret|passw|credential|apikey|api_key|access_?key|auth)[^=&?#\s]*"
    r"|x-(?:amz|goog|ms)-[^=&?#\s]*|expires|key|policy|se|sp|sv|sr|st|spr|ske|sks|skt|skv|skoid|sktid"
)
_SECRET = re.compile(rf"(?:{_SECRET_NAME})=.*", re.IGNORECASE)
_PARAMETERS = re.compile(r"\?((?:[^=&?#\s'\"]+=[^&#\s'\"]*&?)+)")


def is_address(name: str) -> bool:
    """Return whether `name` has a scheme, such as ``s3://`` or fsspec's ``zip://a::s3://b``."""
    return ADDRESS.match(name) is not None


def scheme_of(address: str) -> str:
    """Return the scheme in lower case; of a chain such as ``zip://a::s3://b`` the first one."""
    return re.split(r"::|://", address, maxsplit=1)[0].lower()


def without_secrets(text: str) -> str:
    """Return `text` with credentials removed from every address in it.

    User, password and the parameters that sign a request are removed: a newly signed URL still
    means the same file.
    """
    text = _USER.sub("", text)
    return _PARAMETERS.sub(_kept, text)


def _kept(parameters: re.Match[str]) -> str:
    kept = [pair for pair in parameters[1].split("&") if pair and not _SECRET.fullmatch(pair)]
    return "?" + "&".join(kept) if kept else ""


def name_of(address: str) -> str:
    """Return the path of an address without parameters, like a file name: ``.../a.jsonl.gz``."""
    if scheme_of(address) in ("http", "https"):
        address = re.split(r"[?#]", address, maxsplit=1)[0]
    return unquote(address.partition("::")[0] if "::" in address else address)


def joined(address: str, relative: str) -> str:
    """Return the address of the file `relative`, with slashes, below `address`."""
    return f"{address.rstrip('/')}/{relative}"
