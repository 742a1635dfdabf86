"""Table of illegal combinations, each with the nearest legal one, over the facts of a run.

Pure. The rules hold for DeepSpeed 0.19.8; each names the line of its source, or the experiment,
that it is based on. A combination that DeepSpeed would accept and silently ignore is refused like
one that it would crash on: a setting without effect is a user's mistake. `tools/compatibility.py`
writes the table to docs/compatibility.md, and the tests are generated from it.
"""

from __future__ import annotations

from bigtrain.errors import Problem
from bigtrain.settings.compatibility.adapter_rules import (
    ADAPTER_RULES,
    OPTIMIZER_RULES,
    QUANTIZATION_RULES,
    SITE_RULES,
)
from bigtrain.settings.compatibility.deepspeed_rules import ENGINE_RULES
from bigtrain.settings.compatibility.facts import Device, Facts, Rule
from bigtrain.settings.compatibility.parallel_rules import (
    EXPERT_MODEL_RULES,
    EXPERT_RULES,
    MODEL_RULES,
    PARALLEL_RULES,
)
from bigtrain.settings.compatibility.performance_rules import SPEED_RULES, may_compile

__all__ = [
    "RULES",
    "Device",
    "Facts",
    "Rule",
    "check_compatibility",
    "check_model",
    "is_violated",
    "may_compile",
]

RULES: tuple[Rule, ...] = (
    *PARALLEL_RULES,
    *EXPERT_RULES,
    *MODEL_RULES,
    *EXPERT_MODEL_RULES,
    *ENGINE_RULES,
    *OPTIMIZER_RULES,
    *ADAPTER_RULES,
    *QUANTIZATION_RULES,
    *SPEED_RULES,
    *SITE_RULES,
)


def check_compatibility(facts: Facts) -> list[Problem]:
    """Return a problem for every rule that `facts` violate, in the order of the table."""
    return [rule.problem(facts) for rule in RULES if rule.violated(facts)]


def is_violated(facts: Facts) -> bool:
    """Return whether `facts` violate any rule; faster than listing them."""
    return any(rule.violated(facts) for rule in RULES)


def check_model(facts: Facts) -> list[Problem]:
    """Check only the rules that relate the model to parallel degrees and batch."""
    return [
        rule.problem(facts) for rule in (*MODEL_RULES, *EXPERT_MODEL_RULES) if rule.violated(facts)
    ]
