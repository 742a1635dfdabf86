"""Filter of documents: a function of the user, ``package.module:function``. Pure.

It gets the text of a document and its row, and returns True to keep it, or False or a reason, which
the manifest counts. It is imported in every worker process, as Python does and then from the
directory in which the command was started.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import xxhash

from bigtrain.data.documents.exact_json import read_document
from bigtrain.errors import ConfigError, DataError
from bigtrain.settings.extensions import describe, import_named, location

Function = Callable[[str, Mapping[str, Any]], bool | str]

DROPPED = "no reason given"
"""Reason counted for False."""
MAX_REASON = 200
"""Characters of a reason."""
MAX_REASONS = 1000
"""Different reasons in a unit of work: a manifest counts kinds of reasons, not documents."""
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True)
class TextFilter:
    """Filter `name`, ``package.module:function``, with the XXH3-64 of the file that defines it. Can
    be pickled."""

    name: str
    source_xxh3: str

    def __getstate__(self) -> dict[str, str]:
        return {"name": self.name, "source_xxh3": self.source_xxh3}

    @cached_property
    def function(self) -> Function:
        """Raises DataError if it cannot be imported, or its source has changed."""
        function: Function = _imported(self.name)
        if source_hash(function) != self.source_xxh3:
            raise DataError(
                f"--filter {self.name}: {location(function)} has changed since the start -> "
                "start again"
            )
        return function

    def why_dropped(self, text: str, row: Mapping[str, Any], document_name: str) -> str | None:
        """Return the reason for which a document is dropped; None if it is kept. `document_name`:
        for errors. Raises DataError if the function raises an error, or returns anything but a
        boolean or a reason."""
        try:
            result: Any = self.function(text, row)
        except DataError:
            raise
        except (Exception, SystemExit) as error:
            raise DataError(
                f"--filter {self.name} fails for {document_name}: "
                f"{describe(error, self.function)} -> correct it"
            ) from error
        if type(result).__name__ in ("bool", "bool_"):  # also numpy's
            return None if result else DROPPED
        if isinstance(result, str) and result.strip():
            return " ".join(result.split())[:MAX_REASON]
        raise DataError(
            f"--filter {self.name} returns {result!r} for {document_name} -> True to keep it, "
            f"False or a reason to drop it ({location(self.function)})"
        )

    def count(self, reasons: Counter[str], reason: str) -> None:
        """Count a reason. Raise DataError if there are too many different ones."""
        if reason not in reasons and len(reasons) >= MAX_REASONS:
            raise DataError(
                f"--filter {self.name} gives more than {MAX_REASONS:,} different reasons, such as "
                f"{reason!r}, and each is counted in the manifest -> return kinds of reasons "
                f"({location(self.function)})"
            )
        reasons[reason] += 1


def load_filter(name: str) -> TextFilter:
    """Return the filter `name` after checking that it can be imported and called. Raises DataError
    with the file and line of what is wrong."""
    if not _NAME.fullmatch(name):
        raise DataError(f"--filter {name}: not package.module:function")
    function = _imported(name)
    if not callable(function):
        type_name = type(function).__name__
        raise DataError(f"--filter {name} is not a function but {type_name}")
    if inspect.iscoroutinefunction(function):
        raise DataError(
            f"--filter {name} is a coroutine, which would never run ({location(function)}) -> "
            "write def instead of async def"
        )
    try:
        inspect.signature(function).bind("", {})
    except ValueError:  # of a builtin
        pass
    except TypeError as error:
        raise DataError(
            f"--filter {name} is called as {name.rpartition(':')[2]}(text, row), and takes "
            f"{inspect.signature(function)} ({location(function)}) -> correct it: {error}"
        ) from error
    return TextFilter(name, source_hash(function))


def source_hash(function: object) -> str:
    """Return the XXH3-64 of the file that defines `function`, whose other functions it may call;
    of the function's own source if that is all there is."""
    try:
        file = inspect.getsourcefile(function)  # type: ignore[arg-type]
        if file is not None:
            with open(file, "rb") as opened:
                return xxhash.xxh3_64_hexdigest(opened.read())
        return xxhash.xxh3_64_hexdigest(inspect.getsource(function).encode())  # type: ignore[arg-type]
    except (OSError, TypeError) as error:
        raise DataError(
            f"--filter: the source of {function!r} is not known, so that a change would not be "
            "noticed -> a function in a file"
        ) from error


def text_of_document(content: bytes, *, has_rows: bool) -> str:
    """Return the text of a document for a filter. has_rows: of the JSON of a row in another format:
    its texts, one per line."""
    if not has_rows:
        return content.decode("utf-8")
    return "\n".join(_texts(read_document(content)))


def _texts(tree: Any) -> list[str]:
    """Return prompt, completion and contents of messages, in order."""
    if isinstance(tree, list):
        return [text for item in tree for text in _texts(item)]
    if not isinstance(tree, dict):
        return []
    texts = []
    for key in ("prompt", "completion", "content"):
        if isinstance(tree.get(key), str):
            texts.append(tree[key])
    for key in ("messages", "answer", "chosen", "rejected"):
        texts += _texts(tree.get(key))
    return texts


def _imported(name: str) -> Any:
    try:
        return import_named("--filter", name)
    except ConfigError as error:
        raise DataError("\n".join(map(str, error.problems))) from error
