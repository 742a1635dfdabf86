"""A compatibility rule, and the features of runs that rules combine. Pure."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, TypeVar

from bigtrain.errors import Problem
from bigtrain.settings.compatibility.facts import Fact, Facts

T = TypeVar("T")
Condition = Callable[[Facts], bool]
Changes = Facts | Callable[[Facts], Facts]
Text = str | Callable[[Facts], str]
_NOTHING = Facts()


@dataclass(frozen=True)
class Feature(Generic[T]):
    """A setting that does not go with others: a run has it where `fact` is not its default, is `on`
    (`is_exact`), or `when` holds.

    `on` is its value in examples, which `also` completes. `off` tells users how to turn it off, and
    `without` are the nearest facts without it; both are by default the fact's default. `clause`:
    the end of the sentence that something has not been compared with the feature (`Comparison`).
    """

    fact: Fact[T]
    on: T
    off: str = ""
    _: KW_ONLY
    is_exact: bool = False
    when: Condition | None = None
    also: Facts = _NOTHING
    without: Changes | None = None
    clause: str = ""

    def condition(self) -> Condition:
        """Return the function that returns whether a run has the feature."""
        name, on, default = self.fact.name, self.on, self.fact.default
        if self.is_exact:
            return lambda run: bool(getattr(run, name) == on)
        return self.when or (lambda run: bool(getattr(run, name) != default))

    def off_text(self) -> str:
        """Return how a user turns the feature off."""
        value = self.fact.default
        return (
            self.off or f"{self.fact.key}={value if isinstance(value, str) else json.dumps(value)}"
        )


@dataclass(frozen=True)
class Rule:
    """One kind of run that is refused: a run with all features `of`, where also `when` holds.

    The key of the first feature is reported, with its value or `value`. `fix` tells users what to
    change, and `instead` changes it: by default the first feature. `example` completes the examples
    of the features, of which the first counts, to facts that violate this rule only.
    """

    of: tuple[Feature[Any], ...]
    reason: Text
    _: KW_ONLY
    fix: Text = ""
    when: Condition | None = None
    value: Callable[[Facts], object] | None = None
    example: Facts = _NOTHING
    instead: Changes | None = None

    @functools.cached_property
    def _conditions(self) -> tuple[Condition, ...]:
        conditions = [feature.condition() for feature in self.of]
        return (*conditions, self.when) if self.when else tuple(conditions)

    def violated(self, facts: Facts) -> bool:
        """Return whether `facts` violate this rule."""
        for condition in self._conditions:  # all() takes longer, and a plan asks thousands
            if not condition(facts):
                return False
        return True

    def problem(self, facts: Facts) -> Problem:
        """Return the problem to report for `facts`, which violate this rule."""
        fact, fix = self.of[0].fact, self.fix or self.of[0].off_text()
        value = self.value(facts) if self.value else getattr(facts, fact.name)
        return Problem(
            fact.key.replace("ds:", f"{facts.source}: "),
            ", ".join(value) if isinstance(value, tuple) else value,
            self.reason if isinstance(self.reason, str) else self.reason(facts),
            fix if isinstance(fix, str) else fix(facts),
        )

    def violation(self) -> Facts:
        """Return facts that violate this rule only."""
        features = self.of[::-1]
        values = [Facts(**{feature.fact.name: feature.on}) for feature in features]
        facts = _NOTHING
        for changes in (*(feature.also for feature in features), *values, self.example):
            facts |= changes
        return facts

    def nearest(self, facts: Facts) -> Facts:
        """Return the facts nearest to `facts`, which violate this rule, that do not."""
        changes = self.instead or self.of[0].without
        if changes is None:
            changes = Facts(**{self.of[0].fact.name: self.of[0].fact.default})
        return facts | (changes if isinstance(changes, Facts) else changes(facts))


@dataclass(frozen=True)
class Comparison:
    """Rules against features with which nothing has compared a run with `feature`. `sentence` is
    their reason, without the clause of the other feature, which is blamed unless
    `blames_itself`."""

    feature: Feature[Any]
    sentence: str
    blames_itself: bool = False

    def lacks(
        self,
        other: Feature[Any],
        fix: str = "",
        example: Facts = _NOTHING,
        instead: Changes | None = None,
    ) -> Rule:
        """Return the rule that refuses the feature with `other`."""
        of = (self.feature, other) if self.blames_itself else (other, self.feature)
        reason = f"{self.sentence} {other.clause}"
        return Rule(of, reason, fix=fix or other.off_text(), example=example, instead=instead)
