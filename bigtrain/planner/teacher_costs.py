"""Memory and time of a teacher that a run computes next to its student. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from bigtrain.planner.layout import Layout
from bigtrain.planner.memory import MemoryUse, peak_memory
from bigtrain.planner.model_costs import ModelCosts
from bigtrain.planner.step_time import StepTime, step_time
from bigtrain.planner.tables.engines import Engine
from bigtrain.planner.tables.hardware import Device


@dataclass(frozen=True)
class TeacherCosts:
    """Costs of a teacher: of its model, and in the layout that it has beside a student's.
    layout_beside: returns that layout."""

    model: ModelCosts
    layout_beside: Callable[[Layout], Layout]

    def with_parameters(self, memory: MemoryUse, layout: Layout, engine: Engine) -> MemoryUse:
        """Return `memory` of a student in `layout` with the teacher's parameters. What its passes
        need meanwhile is less than what training needs later."""
        parameters = peak_memory(self.model, self.layout_beside(layout), engine).states
        return replace(memory, teacher=parameters)

    def with_passes(
        self, time: StepTime, layout: Layout, device: Device, engine: Engine
    ) -> StepTime:
        """Return `time` of a student in `layout` with the teacher's forward passes."""
        own_layout = self.layout_beside(layout)
        rows = own_layout.num_reference_rows + own_layout.rows_per_sample
        more_passes = own_layout.changed(num_reference_rows=rows)
        seconds_with_passes, seconds_without = (
            step_time(self.model, timed_layout, device, engine).total
            for timed_layout in (more_passes, own_layout)
        )
        return replace(time, teacher=seconds_with_passes - seconds_without)
