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
    `nearest` are the nearest facts that lack it; both are by default the fact's default. `clause`:
    the end of the sentence that something has not been compared with the feature (`Comparison`).
    """

    fact: Fact[T]
    on: T
    off: str = ""
    _: KW_ONLY
    is_exact: bool = False
    when: Condition | None = None
    also: Facts = _NOTHING
    nearest: Changes | None = None
    clause: str = ""

    def condition(self) -> Condition:
        """Return the function that returns whether a run has the feature."""
        name, on, default = self.fact.name, self.on, self.fact.default
        if self.is_exact:
            return lambda run: getattr(run, name) == on
        return self.when or (lambda run: getattr(run, name) != default)

    def off_text(self) -> str:
        """Return how a user turns the feature off."""
        default = self.fact.default
        value = default if isinstance(default, str) else json.dumps(default)
        return self.off or f"{self.fact.key}={value}"


@dataclass(frozen=True)
class Rule:
    """One kind of run that is refused: a run with all `features`, where also `when` holds.

    The key of the first feature is reported, with its value or `value`. `fix` tells users what to
    change, and `instead` changes it: by default the first feature. `example` completes the examples
    of the features, of which the first counts, to facts that violate this rule only.
    """

    features: tuple[Feature[Any], ...]
    reason: Text
    _: KW_ONLY
    fix: Text = ""
    when: Condition | None = None
    value: Callable[[Facts], object] | None = None
    example: Facts = _NOTHING
    instead: Changes | None = None

    @functools.cached_property
    def _conditions(self) -> tuple[Condition, ...]:
        conditions = [feature.condition() for feature in self.features]
        return (*conditions, self.when) if self.when else tuple(conditions)

    def violated(self, facts: Facts) -> bool:
        """Return whether `facts` violate this rule."""
        for condition in self._conditions:  # all() takes longer, and a plan asks thousands
            if not condition(facts):
                return False
        return True

    def problem(self, facts: Facts) -> Problem:
        """Return the problem to report for `facts`, which violate this rule."""
        fact, fix = self.features[0].fact, self.fix or self.features[0].off_text()
        value = self.value(facts) if self.value else getattr(facts, fact.name)
        return Problem(
            fact.key.replace("ds:", f"{facts.source}: "),
            ", ".join(value) if isinstance(value, tuple) else value,
            self.reason if isinstance(self.reason, str) else self.reason(facts),
            fix if isinstance(fix, str) else fix(facts),
        )

    def violation(self) -> Facts:
        """Return facts that violate this rule only."""
        features = self.features[::-1]  # the first one counts
        values = [Facts(**{feature.fact.name: feature.on}) for feature in features]
        facts = _NOTHING
        for changes in (*(feature.also for feature in features), *values, self.example):
            facts |= changes
        return facts

    def nearest(self, facts: Facts) -> Facts:
        """Return the facts nearest to `facts`, which violate this rule, that do not."""
        changes = self.instead or self.features[0].nearest
        if changes is None:
            changes = Facts(**{self.features[0].fact.name: self.features[0].fact.default})
        return facts | (changes if isinstance(changes, Facts) else changes(facts))


@dataclass(frozen=True)
class Comparison:
    """Rules against features with which nothing has compared a run that has `subject`. `sentence`
    and the clause of the feature are the reason; the feature is blamed, or the subject."""

    subject: Feature[Any]
    sentence: str
    blames_subject: bool = False

    def lacks(
        self,
        feature: Feature[Any],
        fix: str = "",
        example: Facts = _NOTHING,
        instead: Changes | None = None,
    ) -> Rule:
        """Return the rule that refuses the subject with `feature`."""
        pair = (self.subject, feature) if self.blames_subject else (feature, self.subject)
        reason = f"{self.sentence} {feature.clause}"
        return Rule(pair, reason, fix=fix or feature.off_text(), example=example, instead=instead)
