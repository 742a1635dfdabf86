"""The table of illegal combinations, and the functions that apply it. Pure.

`tools/compatibility.py` writes the table to docs/compatibility.md, and the tests are generated
from it.
"""

from __future__ import annotations

from collections.abc import Mapping

from bigtrain.errors import Problem
from bigtrain.settings.compatibility.engine import ENGINE, PERFORMANCE
from bigtrain.settings.compatibility.facts import Facts
from bigtrain.settings.compatibility.parallelism import EXPERT_PARALLEL, MODEL, PARALLEL
from bigtrain.settings.compatibility.rule import Rule
from bigtrain.settings.compatibility.training import (
    ADAPTERS,
    MULTI_TOKEN_PREDICTION,
    OBJECTIVE,
    OPTIMIZERS,
    SITES,
)

GROUPS = (
    PARALLEL,
    EXPERT_PARALLEL,
    MODEL,
    ENGINE,
    OPTIMIZERS,
    ADAPTERS,
    PERFORMANCE,
    OBJECTIVE,
    MULTI_TOKEN_PREDICTION,
    SITES,
)
RULES: Mapping[str, Rule] = {name: rule for group in GROUPS for name, rule in group.items()}


def check_compatibility(facts: Facts) -> list[Problem]:
    """Return a problem for every rule that `facts` violate, in the order of the table."""
    return [rule.problem(facts) for rule in RULES.values() if rule.violated(facts)]


def is_violated(facts: Facts) -> bool:
    """Return whether `facts` violate any rule; faster than listing them."""
    return any(rule.violated(facts) for rule in RULES.values())


def adds_violation(facts: Facts, changes: Facts) -> bool:
    """Return whether a rule that `facts` keep is violated with `changes`. A rule that `facts`
    violate, as in a world whose size is not known, says nothing about the changes."""
    changed = facts | changes
    return any(rule.violated(changed) and not rule.violated(facts) for rule in RULES.values())


def check_model(facts: Facts) -> list[Problem]:
    """Check only the rules that relate the model to parallel degrees and batch."""
    return [rule.problem(facts) for rule in MODEL.values() if rule.violated(facts)]
