"""Rows of a table of keys: the meaning of a key of another trainer for a run. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from bigtrain.settings.conversion.accepted_values import FLAG, Accepted, Values

RowKind = Literal["sets", "read", "note", "only", "refused"]


@dataclass(frozen=True)
class KeyRow:
    """Meaning of a key.

    kind: ``sets``: the key is the setting `path` of the run, whose value is `values[value]`, or the
    same value without `values`; ``read``: decides settings together with other keys (`text` names
    them); ``note``: no counterpart, and no effect on the mathematics; ``only``: `allowed`
    values need no setting, any other value changes the mathematics; ``refused``: any value but
    null, false, 0 and an empty one changes the mathematics. accepted: values that the trainer
    takes, for keys whose values are read. members: rows of the keys within the key's dictionary, or
    within each dictionary of the key's list; without rows, any key may be within it.
    """

    kind: RowKind
    text: str = ""
    path: str = ""
    values: Mapping[Any, Any] = field(default_factory=dict)
    allowed: tuple[Any, ...] = ()
    accepted: Values | None = None
    members: Table = field(default_factory=dict)

    def describe(self) -> str:
        """Return the cell of the row in the table of docs/reference/convert.md."""
        values = ", ".join(f"{name} is {value}" for name, value in self.values.items())
        text_by_kind = {
            "sets": f"`{self.path}`" + (f" ({values})" if values else ""),
            "read": self.text,
            "note": f"no counterpart: {self.text}",
            "only": f"only {' or '.join(map(str, self.allowed))}: {self.text}",
            "refused": f"refused: {self.text}",
        }
        return text_by_kind[self.kind]


Table = Mapping[str, KeyRow]


def sets(path: str, values: Mapping[Any, Any] | None = None) -> KeyRow:
    """Return the row of a key that is a setting of the run."""
    return KeyRow("sets", path=path, values=values or {})


def read(text: str, members: Table | None = None) -> KeyRow:
    """Return the row of a key that decides settings together with other keys."""
    return KeyRow("read", text, members=members or {})


def note(text: str, members: Table | None = None) -> KeyRow:
    """Return the row of a key without counterpart, which does not change the mathematics."""
    return KeyRow("note", text, members=members or {})


def only(allowed: tuple[Any, ...], text: str) -> KeyRow:
    """Return the row of a key of which only some values are what a run does."""
    has_flags = all(isinstance(value, bool) for value in allowed)
    return KeyRow("only", text, allowed=allowed, accepted=FLAG if has_flags else None)


def refused(text: str) -> KeyRow:
    """Return the row of a key without counterpart, which changes the mathematics."""
    return KeyRow("refused", text)


def rows(names: str, row: KeyRow) -> dict[str, KeyRow]:
    """Return a table in which each of the `names`, divided by spaces, has the row."""
    return dict.fromkeys(names.split(), row)


def with_values(table: Table, values: Accepted) -> Table:
    """Return `table` with the values that the trainer takes (`KeyRow.accepted`)."""
    accepted = {
        name: accepted_values for accepted_values, names in values for name in names.split()
    }
    return {**table, **{name: replace(table[name], accepted=accepted[name]) for name in accepted}}
