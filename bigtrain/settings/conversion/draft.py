"""Run YAML that is being made of another trainer's keys. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bigtrain.errors import Problem
from bigtrain.settings.conversion.accepted_values import as_number
from bigtrain.settings.conversion.tables import KeyRow, Table

OMIT = "--omit {} accepts a run without it"
MISSPELLING_SIMILARITY = 0.8
"""Similarity (difflib's ratio) from which an unknown key is taken for a misspelling of a known
one."""


def is_unset(value: object) -> bool:
    """Return whether a value asks for nothing: null, false, 0, or empty."""
    return (
        value is None
        or value is False
        or value in (0, "", "none", "no", "off", "false")
        or value in ([], {})
    )


@dataclass
class Draft:
    """Settings of a run, commands before it, and what has no counterpart.

    trainer: name of the file's trainer. keys: of the file, with values. omitted: keys that the user
    does without (--omit). world_size: ranks; None if it was not given. defaults: the
    trainer's defaults of keys. given_settings: the run's settings that the user sets, as texts, by
    dotted key. run: sections of the run. commands: that make the data. notes: lines on keys without
    counterpart, and on differences. problems: of keys that change the mathematics and have no
    counterpart, or are unknown. unreadable: keys without a usable value, since the file misspells
    the key or the value; each has a problem. missing_settings: dotted keys of the run that neither
    the file nor the user sets; each has a problem.
    """

    trainer: str
    keys: dict[str, Any]
    omitted: Collection[str]
    world_size: int | None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    given_settings: Mapping[str, str] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    unreadable: set[str] = field(default_factory=set)
    missing_settings: list[str] = field(default_factory=list)

    def value(self, key: str, default: Any = None) -> Any:
        """Return the value of a key of the file. If it is absent, null or omitted: the
        trainer's default, or `default`."""
        value = None if key in self.omitted else self._without_omitted(key, self.keys.get(key))
        return self.defaults.get(key, default) if value is None else value

    def _without_omitted(self, path: str, value: Any) -> Any:
        """Return the value at `path` without the keys within it that the user omits."""
        if isinstance(value, Mapping):
            return {
                name: self._without_omitted(f"{path}.{name}", member)
                for name, member in value.items()
                if f"{path}.{name}" not in self.omitted
            }
        if isinstance(value, list):
            return [
                self._without_omitted(f"{path}.{number}", entry)
                for number, entry in enumerate(value)
            ]
        return value

    def value_in_file(self, path: str) -> Any:
        """Return the value at a dotted path of the file (datasets.0.type), even of a key that is
        omitted; None where there is none."""
        value: Any = self.keys
        for name in path.split("."):
            if isinstance(value, list):
                index = int(name) if name.isdecimal() else len(value)
                value = value[index] if index < len(value) else None
            else:
                value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def set(self, path: str, value: Any) -> None:
        """Set a setting of the run, by its dotted key."""
        *parents, name = path.split(".")
        section = self.run
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = value

    def refuse(self, key: str, rule: str, fix: str = "") -> None:
        """Add the problem of a key of the file, unless the key, or a key around or within it, has a
        problem already."""
        for path in self.unreadable:
            if f"{key}.".startswith(f"{path}.") or path.startswith(f"{key}."):
                return
        self.problems.append(Problem(key, self.value_in_file(key), rule, fix or OMIT.format(key)))

    def required_number(self, key: str, path: str, alternative: str = "") -> Any:
        """Return the number that the file has under `key`, or else the user under `path`, the
        setting of the run. If neither has it: 0 if the user sets `alternative`, which replaces the
        setting; else 1, and a problem."""
        number = self.number(key) or as_number(self.given_settings.get(path))
        if isinstance(number, (int, float)) and number:
            return number
        if alternative in self.given_settings:
            return 0
        if key in self.unreadable:
            return 1
        self.missing_settings.append(path)
        fix = f"{path}=VALUE after the file, or a further file with {key}"
        self.refuse(key, "is missing", fix)
        return 1

    def number(self, key: str, default: float | None = None) -> Any:
        """Return the number of a key, which YAML may have read as a text (1e-5). Adds a problem and
        returns `default` if the value is not a number."""
        value = as_number(self.value(key, default))
        if isinstance(value, (int, float)) or value is None:
            return value
        self.refuse(key, "is not a number", "write the number")
        return default

    def mapping(self, key: str) -> dict[str, Any]:
        """Return the dictionary of a key; empty if it is absent, or, with a problem, if the value
        is of another type."""
        value = self.value(key, {})
        if isinstance(value, Mapping):
            return dict(value)
        self.refuse(key, "must hold keys and values", "write {key: value}")
        return {}

    def apply(self, table: Table) -> None:
        """Set, note or refuse each key of the file, as its row of `table` decides; a key without a
        row is refused."""
        self.apply_members("", self.keys, table)

    def apply_members(self, prefix: str, keys: Mapping[str, Any], table: Table) -> None:
        """Apply `table` to the keys of a dictionary. prefix: path of the dictionary in the file, as
        ``datasets.0.``."""
        for name, value in keys.items():
            key = f"{prefix}{name}"
            if key in self.omitted:
                self.notes.append(f"{key} = {value!r}: omitted, as --omit asks")
            elif name not in table:
                if not is_unset(value):
                    absent_rows = {
                        row_key: row for row_key, row in table.items() if row_key not in keys
                    }
                    self._refuse_unknown(prefix, str(name), absent_rows)
            else:
                self._apply_row(key, self._without_omitted(key, value), table[name])
                if table[name].members:
                    for path, entry in _dictionaries(key, value):
                        self.apply_members(f"{path}.", entry, table[name].members)

    def _refuse_unknown(self, prefix: str, name: str, candidates: Table) -> None:
        """Refuse a key without a row. If a key of `candidates` (rows of keys that the file does not
        have) is similar, the refused key is taken for its misspelling, and the similar key is not
        reported as missing. Keys that change the run come first: lora_rank of Axolotl is lora_r,
        not local_rank."""
        fix = OMIT.format(f"{prefix}{name}")
        effective = [key for key, row in candidates.items() if row.kind != "note"]
        similar = difflib.get_close_matches(name, effective, n=1, cutoff=MISSPELLING_SIMILARITY)
        similar = similar or difflib.get_close_matches(
            name, candidates, n=1, cutoff=MISSPELLING_SIMILARITY
        )
        if similar:
            fix = f"did you mean {similar[0]}? Otherwise {fix}"
        self.refuse(f"{prefix}{name}", f"is not a key of {self.trainer} that bigtrain knows", fix)
        self.unreadable.update(f"{prefix}{key}" for key in similar)

    def _apply_row(self, key: str, value: Any, row: KeyRow) -> None:
        """Set, note or refuse a key with a value. Keys of the kind "read" are read elsewhere."""
        if value is None or row.kind == "read":
            return
        if row.kind == "sets":
            is_known = isinstance(value, (str, int, float)) and value in row.values
            if row.values and not is_known:
                choices = ", ".join(map(str, row.values))
                self.refuse(key, f"has no counterpart; these have one: {choices}")
                return
            self.set(row.path, row.values[value] if row.values else as_number(value))
        elif row.kind == "only" and value not in row.allowed:
            self.refuse(key, row.text)
        elif row.kind == "refused" and not is_unset(value):
            self.refuse(key, row.text)
        elif row.kind == "note" and not is_unset(value):
            self.notes.append(f"{key} = {repr(value)[:60]}: {row.text}")


def _dictionaries(path: str, value: object) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield a value that is a dictionary, or each dictionary in a list, with its dotted path."""
    if isinstance(value, Mapping):
        yield path, value
    for number, entry in enumerate(value if isinstance(value, list) else ()):
        if isinstance(entry, Mapping):
            yield f"{path}.{number}", entry
