"""Row formats of the input of `bigtrain tokenize`: kinds of conversations, or text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bigtrain.errors import DataError

if TYPE_CHECKING:
    from bigtrain.data.documents.parts import ReadOptions


@dataclass(frozen=True)
class RowFormat:
    """Format of conversations, its keys in a row, and its role names, as
    ``NAME=ROLE``."""

    name: Any  # of OptionsRecord.chat_format
    keys: tuple[str, ...]
    roles: tuple[str, ...]


def detected_format(reading: ReadOptions, say: Callable[[str], None]) -> str:
    """Return the format of the first row's keys; `say` gets a line on it. Text if
    they match none. Raises DataError if the first rows of the files have several formats."""
    from bigtrain.data.documents.bad_documents import ONE_FORMAT
    from bigtrain.data.documents.chat_formats import nearest
    from bigtrain.data.documents.first_row import keys_in, sources_to_look_at

    formats: dict[str, str] = {}  # the first file of each
    for source in sources_to_look_at(reading):
        keys = keys_in(source, reading)
        if keys or source.kind == "text" or not formats:
            match = nearest(keys)
            formats.setdefault("text" if match is None else match.name, source.path)
    if len(formats) > 1:
        shown = "; ".join(f"{name}: {path}" for name, path in formats.items())
        raise DataError(
            f"the first rows of the inputs have several formats ({shown}) -> {ONE_FORMAT}"
        )
    name = next(iter(formats), "text")
    if name != "text":
        say(f"the keys of the first row match --format {name}")
    return name


def row_format(name: str, names: Mapping[str, str], roles: Mapping[str, str]) -> RowFormat | None:
    """Return the format `name` of conversations, whose keys (of a row, and of a turn in it) have
    other `names` in the data, and roles other names; None for text. Raise DataError for unknown
    keys of `name`."""
    from bigtrain.data.documents.chat_formats import FORMATS

    if name == "text":
        if names:
            raise DataError("--key names keys of conversations -> --text-key for text")
        return None
    if name not in FORMATS:
        raise DataError(f"--format {name}: unknown -> auto, text, {', '.join(FORMATS)}")
    own, turns = FORMATS[name].keys, FORMATS[name].turn_keys
    known = (*own, *turns)
    wrong = next((key for key in names if key not in known), None)
    if wrong is not None:
        raise DataError(f"--key {wrong}: --format {name} has no such key -> {', '.join(known)}")
    keys = tuple(names.get(key, key) for key in known)
    # Defaults of the format are not recorded: earlier versions had no keys of turns, and for
    # messages the key `tools` was implied.
    if keys[len(own) :] == turns:
        keys = keys[: len(own)]
    if name == "messages" and keys[1:] == own[1:]:
        keys = keys[:1]
    if roles and name == "alpaca":
        raise DataError("--role: rows of --format alpaca have no roles -> remove it")
    return RowFormat(name, keys, tuple(f"{said}={role}" for said, role in sorted(roles.items())))


def refuse_for_text(
    reading: ReadOptions, chat_template: object, learn: str, roles: Mapping[str, str]
) -> None:
    """Raise DataError for options of conversations if the input has none, and for an input
    that cannot be read."""
    from bigtrain.data.documents.chat_formats import remedy_for
    from bigtrain.data.documents.first_row import keys_of_first_row

    options = {"--chat-template": chat_template, "--learn": learn == "last", "--role": roles}
    given = next((option for option, value in options.items() if value), None)
    if given is None:
        return
    keys = keys_of_first_row(reading, strict=True)
    shown = f"the first row has the keys {', '.join(sorted(keys)[:20])}"
    remedy = remedy_for(keys) or " -> name their key, --chat-key KEY, or remove it"
    raise DataError(
        f"{given} is for conversations, and {shown if keys else 'no row with keys is read'}{remedy}"
    )
