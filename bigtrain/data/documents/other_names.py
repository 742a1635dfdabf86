"""Names that datasets have for the keys of the formats of rows, for remedies. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from bigtrain.data.documents.row_format import MESSAGE_KEYS
from bigtrain.objectives.preference import PAIRS


@dataclass(frozen=True)
class OtherNames:
    """Names that datasets have for the keys of a format: for keys that a row must have, and for
    keys that it may have."""

    format_name: str
    required: Mapping[str, Sequence[str]]
    optional: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def options_for(self, row: Collection[str]) -> str:
        """Return the options that read `row`: its keys, or an object, of which the values count;
        empty if they are not the keys of this format."""
        keys: dict[str, str] = {}
        for format_key, names in {**self.required, **self.optional}.items():
            key = next((name for name in names if _may_be(format_key, name, row)), None)
            if key is not None:
                keys[format_key] = key
        if not self.required.keys() <= keys.keys():
            return ""
        words = [f" --key {key}={name}" for key, name in keys.items() if key != name]
        return f"--format {self.format_name}{''.join(words)}"


def _may_be(format_key: str, name: str, row: Collection[str]) -> bool:
    """Return whether `row` has `name`, and under it a value of the kind that `format_key` has."""
    if name not in row:
        return False
    value = row[name] if isinstance(row, Mapping) else None
    if value is None or (format_key in MESSAGE_KEYS and isinstance(value, str)):
        return True
    if format_key not in MESSAGE_KEYS:
        return isinstance(value, str)
    return isinstance(value, list) and all(map(has_speaker, value[:1]))


def has_speaker(value: object) -> bool:
    """Return whether `value` is an object with a key of messages or ShareGPT for the speaker."""
    return isinstance(value, dict) and bool({"role", "from"} & value.keys())


LISTS_OF_ROWS = ("data", "rows", "examples", "instances", "samples", "items", "train")
"""Keys under which a file that is one object has all rows."""
_SYSTEM_NAMES = ("system", "system_prompt", "system_message")
_QUESTION_NAMES = ("instruction", "question", "query")
OTHER_NAMES: Sequence[OtherNames] = (
    OtherNames(
        "sharegpt",
        {"conversations": ("conversation", "dialogue", "dialog", "turns", "chat")},
        {"system": _SYSTEM_NAMES},
    ),
    OtherNames(
        PAIRS.name,
        {
            "chosen": ("chosen", "chosen_response", "response_chosen", "response_j", "preferred"),
            "rejected": (
                *("rejected", "rejected_response", "response_rejected"),
                *("response_k", "dispreferred"),
            ),
        },
        {"prompt": ("prompt", *_QUESTION_NAMES, "input")},
    ),
    OtherNames(
        "alpaca",
        {
            "instruction": _QUESTION_NAMES,
            "output": ("output", "response", "answer", "completion", "target"),
        },
        {"input": ("input", "context"), "system": _SYSTEM_NAMES},
    ),
    OtherNames(
        "prompt-completion",
        {"prompt": ("prompt",), "completion": ("response", "answer", "output")},
    ),
)
"""The keys of turns distinguish messages from ShareGPT, and both are accepted under the key of
either."""
