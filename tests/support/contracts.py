"""Library behaviour that patch modules rely on, each as one sentence that an upgrade may break."""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

Relies = Callable[..., Any] | str
"""A function of a patch module, or the name of what else relies on a part."""


@dataclass(frozen=True)
class Contract:
    """Contract of a patch. relies: on the given check. says: the sentence that is false where
    `holds` is false or fails."""

    relies: Relies
    says: str
    holds: Callable[[], object]

    @property
    def name(self) -> str:
        return self.relies if isinstance(self.relies, str) else self.relies.__name__

    def check(self, library: str) -> None:
        try:
            holds = bool(self.holds())
        except (AttributeError, ImportError, KeyError, OSError, TypeError, ValueError):
            holds = False
        version = importlib.metadata.version(library)
        assert holds, f"{library} {version}: {self.says}, on which {self.name} relies"


def title(contract: Contract) -> str:
    """Return the name of a test."""
    return f"{contract.name}-{contract.says}"


def has(relies: Relies, owner: Callable[[], Any], name: str) -> Contract:
    """Return `owner()` has an attribute `name`."""
    where = _said(owner)
    return Contract(relies, f"{where} has no {name} any more", lambda: hasattr(owner(), name))


def takes(relies: Relies, function: Callable[[], Any], *names: str) -> Contract:
    """Return `function()` has the parameters `names`, in this order and no others; a string may
    contain several."""
    parameters = " ".join(names).split()
    said = f"{_said(function)} does not take ({', '.join(parameters)}) any more"
    return Contract(relies, said, lambda: [*inspect.signature(function()).parameters] == parameters)


def reads(relies: Relies, owner: Callable[[], Any], *code: str) -> Contract:
    """Return the source of `owner()` contains each of `code`."""
    said = f"{_said(owner)} does not contain `{'` and `'.join(code)}` any more"
    return Contract(relies, said, lambda: all(c in _source(owner()) for c in code))


def is_as_read(relies: Relies, owner: Callable[[], Any], digest: str) -> Contract:
    """Check that the source of `owner()` has this digest: for code that a patch replaces, line by
    line.

    After an upgrade: read both versions, carry over what has changed, and write the new digest.
    """
    said = f"{_said(owner)} is not the replaced one"
    return Contract(relies, said, lambda: source_digest(owner()) == digest)


def source_digest(owner: Any) -> str:
    """Return the first 12 digits of the SHA-256 of an object's source."""
    return hashlib.sha256(_source(owner).encode()).hexdigest()[:12]


def sets(relies: Relies, owner: Callable[[], Any], *names: str) -> Contract:
    """Return the source of `owner()` assigns attributes of these names; a string may contain
    several."""
    attributes = " ".join(names).split()
    said = f"{_said(owner)} does not set {', '.join(attributes)} any more"
    return Contract(
        relies,
        said,
        lambda: all(
            re.search(rf"\.{name}(: [^=\n]*)? = ", _source(owner())) for name in attributes
        ),
    )


@cache
def _source(owner: Any) -> str:
    return inspect.getsource(owner)


def _said(owner: Callable[[], Any]) -> str:
    """Return the result of a lambda, as source text or by its name."""
    try:
        owned = owner()
    except (AttributeError, ImportError):
        written = inspect.getsource(owner)
        named = re.search(r"lambda: ([\w.()]+)", written)
        return named[1] if named else written.strip()
    # Not its repr: an address in the name of a test differs between the workers that collect it.
    name = getattr(owned, "__qualname__", None) or getattr(owned, "__name__", None)
    return str(name or type(owned).__name__)


def public_functions(module: ModuleType) -> set[str]:
    """Return names of the functions and classes that `module` itself defines for others."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and getattr(value, "__module__", None) == module.__name__
        and (inspect.isfunction(value) or inspect.isclass(value))
    }
