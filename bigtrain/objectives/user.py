"""Objective of a class of the user, named as package.module:Class. Pure; imports the class."""

from __future__ import annotations

import inspect
from typing import Any, get_args

from pydantic import Field

from bigtrain.errors import ConfigError, Problem
from bigtrain.objectives.kind import ObjectiveFields, ObjectiveKind, RunSections, Unit
from bigtrain.objectives.preference import PAIRS
from bigtrain.objectives.rows import AnswerRows
from bigtrain.settings.extensions import call_problem, import_named, location
from bigtrain.settings.sections.extensions import CodeSettings

_KEY = "objective.type"


class UserFields(ObjectiveFields):
    """Field of a class of the user."""

    settings: CodeSettings = Field(default_factory=dict)
    """arguments of the constructor of a class of yours"""


class UserObjective(ObjectiveKind[UserFields]):
    """Function of log-probabilities that a class of the user defines: `loss`, and optionally `unit`
    and `reference`. Raises ConfigError when asked if the class cannot be imported."""

    fields = UserFields
    loss = "bigtrain.objectives.losses.user:UserLoss"
    metrics = None

    def __init__(self, section: UserFields) -> None:
        super().__init__(section)
        self.name = section.type  # type: ignore[misc]

    @property
    def unit(self) -> Unit:  # type: ignore[override]
        unit: Unit = getattr(import_named(_KEY, self.name), "unit", "tokens")
        return unit

    @property
    def rows(self) -> AnswerRows | None:  # type: ignore[override]
        return PAIRS if self.unit == "pairs" else None

    @property
    def needs_reference(self) -> bool:
        return bool(getattr(import_named(_KEY, self.name), "reference", False))

    def import_problems(self) -> list[Problem]:
        """Return the problems of the class: import, constructor, `loss`, unit."""
        name, settings = self.name, self.section.settings
        try:
            objective_class: Any = import_named(_KEY, name)
        except ConfigError as error:
            return list(error.problems)
        defined_at = location(objective_class) or name
        if not inspect.isclass(objective_class):
            remedy = "name the class, whose constructor gets objective.settings"
            return [Problem(_KEY, name, f"is not a class ({defined_at})", remedy)]
        loss = getattr(objective_class, "loss", None)
        if not callable(loss):
            rule = f"has no loss ({defined_at})"
            return [Problem(_KEY, name, rule, "def loss(self, batch): ...")]
        problems = [
            call_problem("objective.settings", settings, objective_class, [], settings),
            call_problem(_KEY, name, loss, ["self", "batch"], {}, label="loss"),
        ]
        unit = getattr(objective_class, "unit", "tokens")
        if unit not in get_args(Unit):
            rule = f"unit = {unit!r} is not one of {', '.join(get_args(Unit))} ({defined_at})"
            problems.append(Problem(_KEY, name, rule, "the unit of the mean: unit = 'rows'"))
        return [problem for problem in problems if problem is not None]

    def problems(self, run: RunSections) -> list[Problem]:
        """Return the problems of settings of other sections, also of a reference: its
        log-probabilities are of tokens, and only the passes of a step compute them."""
        problems = super().problems(run)
        if not self.needs_reference:
            return problems
        adapters = run.adapters
        if adapters is None:
            rule = (
                "reference = True asks for log-probabilities without adapters, and the run has none"
            )
            return [*problems, Problem(_KEY, self.name, rule, "adapters: {type: lora}")]
        if run.parallel.pipeline > 1:
            rule = (
                "reference = True asks for passes without adapters, which pipeline stages do "
                "not make"
            )
            return [*problems, Problem(_KEY, self.name, rule, "parallel.pipeline=1")]
        rule = (
            "changes the model also with its adapters off, by which objective.type = "
            f"{self.name!r} gets its reference"
        )
        settings = (("dora", adapters.dora), ("modules_to_save", list(adapters.modules_to_save)))
        return problems + [
            Problem(f"adapters.{name}", value, rule, "omit it") for name, value in settings if value
        ]
