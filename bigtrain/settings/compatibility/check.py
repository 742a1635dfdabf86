"""The table of illegal combinations in rules.yaml, and the function that applies it. Pure.

`tools/compatibility.py` writes the table to docs/compatibility.md, and the tests are generated
from it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bigtrain.errors import Problem
from bigtrain.settings.compatibility.facts import DECLARED, Device, Facts

__all__ = ["RULES", "Device", "Facts", "Rule", "check_compatibility", "check_model", "is_violated"]

# Reads a value from the facts, and tests it.
_Condition = tuple[Callable[[Facts], Any], Callable[[Any], object]]
_COMPARISONS: Mapping[str, Callable[[Any, Any], object]] = {
    "<": operator.lt,
    ">": operator.gt,
    "does not divide": lambda value, number: number % value,
}
_LITERALS: Mapping[str, object] = {"null": None, "[]": ()}


@dataclass(frozen=True)
class Rule:
    """One cell of the table: its conditions, all of which hold where a run is refused.

    `blames` is the fact whose key is reported, with the ``value`` of `reported` if there is one,
    and otherwise with the value of the fact. `nearest_changes` are the facts that make the run
    legal; `example` violates this rule only.
    """

    name: str
    group: str
    conditions: tuple[_Condition, ...]
    blames: str
    reported: Mapping[str, object]
    reason_text: str
    fix_text: str
    nearest_changes: Mapping[str, Any]
    example: Facts

    @property
    def key(self) -> str:
        """Key of the run YAML, or of the DeepSpeed JSON with a leading ``ds:``."""
        return DECLARED[self.blames].key

    def violated(self, facts: Facts) -> bool:
        """Return whether `facts` violate this rule."""
        return _hold(self.conditions, facts)

    def reason(self, facts: Facts) -> str:
        """Return the reason why `facts` are refused."""
        return _filled(self.reason_text, facts)

    def nearest(self, facts: Facts) -> Facts:
        """Return the facts nearest to `facts`, which violate this rule, that do not."""
        changes = {name: _value(value, facts) for name, value in self.nearest_changes.items()}
        return facts.changed(**changes)

    def problem(self, facts: Facts) -> Problem:
        """Return the problem to report for `facts`, which violate this rule."""
        value = self.reported.get("value", facts[self.blames])
        if isinstance(value, tuple):
            value = ", ".join(value)
        key = self.key.replace("ds:", f"{facts.source}: ")
        return Problem(key, value, self.reason(facts), _filled(self.fix_text, facts))


def _value(value: Any, facts: Facts) -> Any:
    """Return a value of the table: a fact's where it is the fact's name in braces."""
    if isinstance(value, str) and value.startswith("{"):
        return facts[value.strip("{}")]
    return tuple(value) if isinstance(value, list) else value


def _filled(text: str, facts: Facts) -> str:
    return text.format_map(_Shown(facts)) if "{" in text else text


class _Shown:
    """Facts as texts contain them."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts

    def __getitem__(self, name: str) -> str:
        value = self._facts[name]
        return " or ".join(map(str, value)) if isinstance(value, list) else str(value)


def _condition(name: str, expected: Any) -> _Condition:
    """Return the condition that the table writes as ``name: wanted``."""
    if name == "any":
        cases = [tuple(_condition(*item) for item in case.items()) for case in expected]
        return lambda facts: facts, lambda facts: any(_hold(case, facts) for case in cases)
    read = operator.attrgetter(name)
    read(Facts())  # raises AttributeError for an unknown fact
    if isinstance(expected, list):
        return read, tuple(expected).__contains__
    sign, _, text = expected.rpartition(" ") if isinstance(expected, str) else ("", "", "")
    if not sign:
        return read, functools.partial(operator.eq, expected)
    if sign == "!=":
        return read, functools.partial(operator.ne, _LITERALS.get(text, text))
    compare = _COMPARISONS[sign]
    if text.isdecimal():
        return read, lambda value: value is not None and compare(value, int(text))
    return operator.attrgetter(name, text), lambda two: None not in two and compare(*two)


def _hold(conditions: tuple[_Condition, ...], facts: Facts) -> bool:
    for read, test in conditions:  # all() takes twice the time, and a plan asks thousands
        if not test(read(facts)):
            return False
    return True


def _read_rules() -> tuple[Rule, ...]:
    # The loader in C takes a tenth of the time; not every PyYAML has it.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    path = Path(__file__).with_name("rules.yaml")
    table = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
    rules = []
    for group, rows in table["rules"].items():
        for row in rows:
            # A row adds conditions to those of its features; the first feature is blamed.
            parts = [*(table["features"][name] for name in row.get("of", ())), row]
            conditions = [item for part in parts for item in part.get("if", {}).items()]
            example = {k: v for part in parts for k, v in part.get("example", {}).items()}
            rule = Rule(
                name=row["name"],
                group=group,
                conditions=tuple(_condition(name, expected) for name, expected in conditions),
                blames=row.get("blames") or parts[0]["blames"],
                reported={"value": row["value"]} if "value" in row else {},
                reason_text=row["reason"],
                fix_text=row["fix"],
                nearest_changes=row.get("without") or parts[0]["without"],
                example=Facts(**{name: _value(value, Facts()) for name, value in example.items()}),
            )
            rules.append(rule)
    return tuple(rules)


RULES = _read_rules()


def check_compatibility(facts: Facts) -> list[Problem]:
    """Return a problem for every rule that `facts` violate, in the order of the table."""
    return [rule.problem(facts) for rule in RULES if rule.violated(facts)]


def is_violated(facts: Facts) -> bool:
    """Return whether `facts` violate any rule; faster than listing them."""
    return any(rule.violated(facts) for rule in RULES)


def check_model(facts: Facts) -> list[Problem]:
    """Check only the rules that relate the model to parallel degrees and batch."""
    rules = (rule for rule in RULES if rule.group == "model")
    return [rule.problem(facts) for rule in rules if rule.violated(facts)]
