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
    """A setting that rules refuse in combination with others.

    A run has the feature if `when` holds; by default, if `fact` differs from its default, or with
    `is_exact`, if `fact` is `on`. `on`: value of `fact` in examples. also: further facts of
    examples. off: how a user turns the feature off. nearest: changes of a run that turn it off.
    Without `off` and `nearest`, `fact` gets its default. clause: the end of the sentence "... has
    not been compared ..." (`Comparison`).
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
    """One kind of run that is refused: a run with all `features` for which `when` holds.

    The problem has the key of the first feature, and its value or `value`. fix: what a user
    changes; instead: that change of the facts; both turn off the first feature by default. example:
    facts to add to the features' examples, so that they violate only this rule.
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
            # ``ds:`` marks a key of the DeepSpeed JSON, whose file is the source.
            fact.key.replace("ds:", f"{facts.source}: "),
            ", ".join(value) if isinstance(value, tuple) else value,
            self.reason if isinstance(self.reason, str) else self.reason(facts),
            fix if isinstance(fix, str) else fix(facts),
        )

    def violation(self) -> Facts:
        """Return facts that violate only this rule."""
        # Later changes replace earlier ones: the first feature comes last.
        features = self.features[::-1]
        values = [Facts(**{feature.fact.name: feature.on}) for feature in features]
        facts = _NOTHING
        for changes in (*(feature.also for feature in features), *values, self.example):
            facts |= changes
        return facts

    def nearest(self, facts: Facts) -> Facts:
        """Return `facts`, which violate this rule, with the change that makes them comply."""
        first = self.features[0]
        changes = self.instead or first.nearest
        if changes is None:
            changes = Facts(**{first.fact.name: first.fact.default})
        return facts | (changes if isinstance(changes, Facts) else changes(facts))


@dataclass(frozen=True)
class Comparison:
    """Maker of rules that refuse `subject` with features for which no comparison exists.

    The reason of a rule is `sentence` and the feature's clause. The problem has the key of the
    feature, or of the subject (`blames_subject`).
    """

    subject: Feature[Any]
    sentence: str
    blames_subject: bool = False

    def rule_against(
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
