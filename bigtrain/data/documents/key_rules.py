"""Rules for the keys of a row: refused keys, and counts of unread keys. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache, cached_property

from bigtrain.data.documents.row_keys import ROW_KEYS, RowKey, Values

MAX_SHAPES = 4096
"""Sets of keys that are counted apart; rows with data as keys may have any number."""
MAX_NAMES = 1000
OTHER_NAMES = "(other keys)"


@dataclass
class KeyCounts:
    """Counts of the rows that have each key."""

    shapes: Counter[tuple[str, ...]] = field(default_factory=Counter)
    names: Counter[str] = field(default_factory=Counter)

    def add(self, keys: Iterable[str], rows: int = 1) -> None:
        """Count `rows` rows that all have `keys`."""
        self.shapes[tuple(keys)] += rows
        if len(self.shapes) > MAX_SHAPES:
            self._fold()

    def unread(self, rules: KeyRules) -> dict[str, int]:
        """Return the number of rows with a key, by key, for keys that `rules` do not read."""
        self._fold()
        return {key: rows for key, rows in self.names.items() if not rules.reads(key)}

    def _fold(self) -> None:
        for shape, rows in self.shapes.items():
            for key in shape:
                is_counted = key in self.names or len(self.names) < MAX_NAMES
                self.names[key if is_counted else OTHER_NAMES] += rows
        self.shapes.clear()


def names_in(tree: Mapping[str, object], read_keys: Sequence[str], above: str = "") -> list[str]:
    """Return the names of the keys of a row, or of the objects of names in a schema: of an object
    of which only paths below are read (``meta.text``), the paths of all of its keys."""
    if not any("." in path for path in read_keys):
        return [*tree]
    names: list[str] = []
    for key, value in tree.items():
        name = f"{above}{key}"
        is_opened = any(path.startswith(f"{name}.") for path in read_keys)
        if is_opened and isinstance(value, Mapping) and name not in read_keys:
            names += names_in(value, read_keys, f"{name}.")
        else:
            names.append(name)
    return names


@dataclass(frozen=True)
class KeyRules:
    """Rules for the keys of rows of `format`. read_keys: keys, or paths, in the order of the
    format's keys; ignored: keys that the user does not want to be read."""

    format: str
    read_keys: tuple[str, ...]
    ignored: tuple[str, ...] = ()

    @cached_property
    def refused(self) -> Mapping[str, tuple[RowKey, ...]]:
        """Keys some of whose values are refused: no key that is read, and none below which a path
        is read."""
        read_names = {name for path in self.read_keys for name in (path, path.partition(".")[0])}
        entries: dict[str, tuple[RowKey, ...]] = {}
        for entry in ROW_KEYS:
            if entry.action == "refused" and self.format in entry.formats:
                for name in entry.names:
                    if name not in read_names and name not in self.ignored:
                        entries[name] = (*entries.get(name, ()), entry)
        return entries

    def problem(self, row: Values, values: Values) -> str:
        """Return why a row is refused, for the first refused key in the order of `ROW_KEYS`; empty
        if it is accepted. `values`: of the format's keys."""
        present = self.refused.keys() & row.keys()
        ordered = [name for name in self.refused if name in present] if present else []
        for name in ordered:
            value = row[name]
            for entry in self.refused[name]:
                if entry.matters(value, values):
                    first = self.read_keys[0] if self.read_keys else ""
                    literal = repr(value)
                    if len(literal) > 60:
                        literal = f"{literal[:60]}..."
                    return entry.text.format(name=name, value=literal, first=first)
        return ""

    def reads(self, key: str) -> bool:
        """Return whether a key is used, or known to change nothing in a row that is accepted."""
        if key in self.read_keys or key in self.ignored:
            return True
        if any(path.startswith(f"{key}.") for path in self.read_keys):
            return True
        return key in self.refused and not any(entry.is_named for entry in self.refused[key])

    def meaning(self, key: str) -> str:
        """Return what an unread `key` may have meant; empty if nothing is known."""
        for entry in ROW_KEYS:
            if entry.action == "not read" and key in entry.names and self.format in entry.formats:
                return entry.text
        other_keys = [name for name in (*self.refused, *self.read_keys) if name != key]
        spelled = {_spelling(name): name for name in other_keys}
        close = get_close_matches(_spelling(key), spelled, 1, 0.8)
        return f"{spelled[close[0]]}?" if close else ""


@cache
def text_rules(text_keys: tuple[str, ...], ignored: tuple[str, ...]) -> KeyRules:
    """Return the rules for rows of text."""
    return KeyRules("text", text_keys, ignored)


def _spelling(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def describe_unread(counts: Mapping[str, int], rules: KeyRules) -> str:
    """Return a line that names the keys of rows that are not read, the known ones first."""
    meanings = {key: rules.meaning(key) for key in counts}
    ordered = sorted(counts, key=lambda key: (not meanings[key], -counts[key], key))
    described = [
        f"{key} ({counts[key]:,} rows{'; ' + meanings[key] if meanings[key] else ''})"
        for key in ordered[:20]
    ]
    num_others = f", and {len(ordered) - 20} others" if len(ordered) > 20 else ""
    return f"keys of rows that are not read: {', '.join(described)}{num_others}"


def table_of_keys() -> Sequence[tuple[str, str, str, str]]:
    """Return the lines of the table in the documentation: keys, formats, tools, what is done."""
    lines = []
    for entry in ROW_KEYS:
        text = entry.text.format(name="KEY", value="VALUE", first="messages")
        keys = ", ".join(f"`{name}`" for name in entry.names)
        lines.append((keys, ", ".join(entry.formats), entry.tools, f"{entry.action}: {text}"))
    return lines
