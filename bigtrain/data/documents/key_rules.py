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
SHOWN_NAMES, SHOWN_CHARACTERS = 20, 60
OTHER_NAMES = "(other keys)"


@dataclass
class KeyCounts:
    """Counts of the rows that have each key."""

    shapes: Counter[tuple[str, ...]] = field(default_factory=Counter)
    names: Counter[str] = field(default_factory=Counter)

    def add(self, keys: Iterable[str], num_rows: int = 1) -> None:
        """Count `num_rows` rows that all have `keys`."""
        self.shapes[tuple(keys)] += num_rows
        if len(self.shapes) > MAX_SHAPES:
            self._fold()

    def unread(self, rules: KeyRules) -> dict[str, int]:
        """Return the number of rows with a key, by key, for keys that `rules` do not read."""
        self._fold()
        return {key: num_rows for key, num_rows in self.names.items() if not rules.reads(key)}

    def _fold(self) -> None:
        """Add the counts of sets of keys to the counts of keys, of which there are a maximum."""
        for shape, num_rows in self.shapes.items():
            for key in shape:
                is_counted = key in self.names or len(self.names) < MAX_NAMES
                self.names[key if is_counted else OTHER_NAMES] += num_rows
        self.shapes.clear()


def names_in(tree: Mapping[str, object], read_keys: Sequence[str], parent: str = "") -> list[str]:
    """Return the keys of a row, or of a tree of column names. An object of which only paths are
    read (``meta.text``) is replaced by the path of every key. parent: path of `tree`, and a dot."""
    if not any("." in path for path in read_keys):
        return [*tree]
    names: list[str] = []
    for key, value in tree.items():
        name = f"{parent}{key}"
        has_paths_read = any(path.startswith(f"{name}.") for path in read_keys)
        if has_paths_read and isinstance(value, Mapping) and name not in read_keys:
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
        """Entries of `ROW_KEYS` by the key that they may refuse; none for a key that is read, or
        that begins a path that is read."""
        path_beginnings = (path.partition(".")[0] for path in self.read_keys)
        skipped = {*self.read_keys, *path_beginnings, *self.ignored}
        entries_by_key: dict[str, tuple[RowKey, ...]] = {}
        for entry in ROW_KEYS:
            if entry.action == "refused" and self.format in entry.formats:
                for name in (name for name in entry.names if name not in skipped):
                    entries_by_key[name] = (*entries_by_key.get(name, ()), entry)
        return entries_by_key

    def problem(self, row: Values, values: Values) -> str:
        """Return why a row is refused, for the first refused key in the order of `ROW_KEYS`; empty
        if it is accepted. `values`: of the format's keys."""
        if self.refused.keys().isdisjoint(row):  # as most rows
            return ""
        for name in (name for name in self.refused if name in row):
            value = row[name]
            for entry in self.refused[name]:
                if entry.matters(value, values):
                    first = self.read_keys[0] if self.read_keys else ""
                    literal = repr(value)
                    if len(literal) > SHOWN_CHARACTERS:
                        literal = f"{literal[:SHOWN_CHARACTERS]}..."
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
        names_by_spelling = {_spelling(name): name for name in other_keys}
        close_spellings = get_close_matches(_spelling(key), names_by_spelling, n=1, cutoff=0.8)
        return f"{names_by_spelling[close_spellings[0]]}?" if close_spellings else ""


@cache
def text_rules(text_keys: tuple[str, ...], ignored: tuple[str, ...]) -> KeyRules:
    """Return the rules for rows of text."""
    return KeyRules("text", text_keys, ignored)


def _spelling(name: str) -> str:
    """Return the lower-case letters and digits of a key: `loss-mask` and `lossMask` are equal."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def describe_unread(counts: Mapping[str, int], rules: KeyRules) -> str:
    """Return a line that names the keys of rows that are not read, the known ones first."""
    meanings = {key: rules.meaning(key) for key in counts}
    # First keys with a meaning, then frequent keys.
    ordered = sorted(counts, key=lambda key: (not meanings[key], -counts[key], key))
    described = [
        f"{key} ({counts[key]:,} rows{'; ' + meanings[key] if meanings[key] else ''})"
        for key in ordered[:SHOWN_NAMES]
    ]
    if len(ordered) > SHOWN_NAMES:
        described[-1] += f", and {len(ordered) - SHOWN_NAMES} others"
    return f"keys of rows that are not read: {', '.join(described)}"


def table_of_keys() -> Sequence[tuple[str, str, str, str]]:
    """Return the lines of the table in the documentation: keys, formats, tools, what is done."""
    lines = []
    for entry in ROW_KEYS:
        text = entry.text.format(name="KEY", value="VALUE", first="messages")
        keys = ", ".join(f"`{name}`" for name in entry.names)
        lines.append((keys, ", ".join(entry.formats), entry.tools, f"{entry.action}: {text}"))
    return lines
