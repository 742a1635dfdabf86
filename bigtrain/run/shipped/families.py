"""Metrics of a run as exporters name them, from the declared metrics of a step. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from bigtrain.metrics.step_metrics import StepMetrics
from bigtrain.run.run_view import RunView

EVALUATION = "evaluation"
ENTRY = "entry"
"""Label of the entries of a metric that is an object."""


@dataclass(frozen=True)
class Family:
    """Declared metric. is_count: whether it counts from the beginning of the run, and is a field of
    `RunView`. has_entries: whether it is an object of numbers."""

    name: str
    meaning: str
    unit: str = ""
    is_count: bool = False
    has_entries: bool = False

    def values(self, view: RunView) -> dict[str, float]:
        """Return the known numbers by entry; the entry of a plain number is empty."""
        value: Any
        if self.name == EVALUATION:
            value = view.evaluation
        elif self.is_count:
            value = getattr(view, self.name)
        else:
            value = view.metrics.get(self.name)
        entries = value if isinstance(value, Mapping) else {"": value}
        return {key: float(item) for key, item in entries.items() if isinstance(item, int | float)}


FAMILIES = (
    *(
        Family(
            row.name,
            row.metadata["meaning"],
            row.metadata.get("unit", ""),
            is_count=row.metadata["kind"] == "position",
            has_entries=row.metadata["kind"] == "entries",
        )
        for row in fields(StepMetrics)
    ),
    Family(EVALUATION, "metrics of the last evaluation of this launch, by name", has_entries=True),
)
"""The metrics of a step (`StepMetrics`), and those of the last evaluation."""
