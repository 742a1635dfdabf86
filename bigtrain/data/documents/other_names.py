"""Names that datasets have for the keys of the formats of rows, for remedies. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bigtrain.data.documents.conversations import from_text
from bigtrain.data.documents.row_format import MESSAGE_KEYS
from bigtrain.objectives.preference import PAIRS


class Suggestion(NamedTuple):
    """Options that read a row, and keys of texts that the options do not read."""

    options: str
    unread: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.options} (not read: {', '.join(self.unread)})" if self.unread else self.options
        )


@dataclass(frozen=True)
class OtherNames:
    """Names that datasets have for the keys of a format, in any case: for keys that a row must
    have, and for keys that it may have. A name may be a path (``input.messages``)."""

    format_name: str
    required: Mapping[str, Sequence[str]]
    optional: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def suggestion(self, row: Collection[str]) -> Suggestion | None:
        """Return the options that read `row`: its keys, or an object, of which the values count;
        None if they are not the keys of this format."""
        # Of keys that differ only in case the first is used.
        keys_by_lower = {name.lower(): name for name in reversed([*row])}
        matches: dict[str, str] = {}  # paths in the row, by the format's keys
        for format_key, names in {**self.required, **self.optional}.items():
            paths = (_path_in(name, row, keys_by_lower) for name in names)
            unused = (path for path in paths if path and path not in matches.values())
            match = next((path for path in unused if _may_be(format_key, path, row)), None)
            if match is not None:
                matches[format_key] = match
        if not self.required.keys() <= matches.keys():
            return None
        words = [f" --key {key}={path}" for key, path in matches.items() if key != path]
        unread = [name for name in row if name not in matches.values() and _is_text(name, row)]
        return Suggestion(f"--format {self.format_name}{''.join(words)}", tuple(unread))


def _is_text(name: str, row: Collection[str]) -> bool:
    """Return whether the value under `name` is a text that matters: the name is one of
    `_TEXT_NAMES`, or the text has several words."""
    is_known = name.lower() in _TEXT_NAMES
    if not isinstance(row, Mapping):
        return is_known
    value = row[name]
    return isinstance(value, str) and bool(value) and (is_known or len(value.split()) > 1)


def _path_in(name: str, row: Collection[str], keys_by_lower: Mapping[str, str]) -> str | None:
    """Return the key or path in `row` that is `name` in any case; None if it has none.
    keys_by_lower: keys of `row` by their lower case."""
    first, _, path_below = name.partition(".")
    if first not in keys_by_lower:
        return None
    key = keys_by_lower[first]
    if not path_below:
        return key
    below = row[key] if isinstance(row, Mapping) else None
    return f"{key}.{path_below}" if isinstance(below, dict) and path_below in below else None


def _may_be(format_key: str, path: str, row: Collection[str]) -> bool:
    """Return whether the value at `path` in `row` has a type that `format_key` may have; true if
    the value is unknown."""
    value: Any = None
    if isinstance(row, Mapping):
        value = row.get(path)
        if path not in row:
            first, _, path_below = path.partition(".")
            value = row[first][path_below]
    if value is None:
        return True
    if format_key == "tools":
        return isinstance(value, list | str)
    if format_key not in MESSAGE_KEYS:
        return isinstance(value, str)
    if isinstance(value, str) and format_key not in ("messages", "conversations"):
        return True  # prompts and answers may be text
    value = from_text(value)
    return isinstance(value, list) and all(map(has_speaker, value[:1]))


def has_speaker(value: object) -> bool:
    """Return whether `value` is an object with a key of messages or ShareGPT for the speaker."""
    return isinstance(value, dict) and bool({"role", "from"} & value.keys())


def list_of_rows(row: Mapping[str, Any]) -> str | None:
    """Return the key under which the file that is `row` has its rows; None if there is none."""
    for key in _LISTS_OF_ROWS:
        rows = row.get(key)
        if isinstance(rows, list) and rows and isinstance(rows[0], dict):
            return key
    return None


_LISTS_OF_ROWS = ("data", "rows", "examples", "instances", "samples", "items", "train")
"""Keys under which a file that is one object has all rows."""
_SYSTEM_NAMES = ("system", "system_prompt", "system_message")
_QUESTION_NAMES = ("instruction", "question", "query", "problem")
_CONTEXT_NAMES = ("input", "context")
_ANSWER_NAMES = ("output", "response", "answer", "completion", "target", "solution")
_REASONING_NAMES = ("reasoning", "thinking", "rationale", "explanation", "cot", "complex_cot")
_TEXT_NAMES = frozenset(
    (*_SYSTEM_NAMES, *_QUESTION_NAMES, *_CONTEXT_NAMES, *_ANSWER_NAMES, *_REASONING_NAMES, "prompt")
)
"""Keys of texts that a suggestion lists as unread if its options do not read them."""
OTHER_NAMES: Sequence[OtherNames] = (
    OtherNames(
        "sharegpt",
        {"conversations": ("conversation", "dialogue", "dialog", "turns", "chat", "data", "items")},
        {"system": _SYSTEM_NAMES, "tools": ("tools",)},
    ),
    OtherNames(
        PAIRS.name,
        {
            "chosen": (
                *("chosen", "chosen_response", "response_chosen", "response_j", "preferred"),
                "preferred_output",
            ),
            "rejected": (
                *("rejected", "rejected_response", "response_rejected"),
                *("response_k", "dispreferred", "non_preferred_output"),
            ),
        },
        {
            "prompt": ("prompt", *_QUESTION_NAMES, "input", "input.messages"),
            "tools": ("tools", "input.tools"),
        },
    ),
    OtherNames(
        "alpaca",
        {"instruction": _QUESTION_NAMES, "output": _ANSWER_NAMES},
        {"input": _CONTEXT_NAMES, "system": _SYSTEM_NAMES},
    ),
    OtherNames(
        "prompt-completion",
        {"prompt": ("prompt",), "completion": ("response", "answer", "output")},
    ),
    OtherNames(
        "alpaca",
        {"instruction": ("input", "inputs"), "output": ("output", "target", "targets")},
        {"system": _SYSTEM_NAMES},
    ),
)
"""Names in the order in which they are tried. Format `sharegpt` also reads messages in OpenAI's
format: the keys of each turn distinguish them."""
