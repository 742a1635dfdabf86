"""Result of a launch of a run, with its final metrics. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bigtrain.errors import EXIT_STOPPED


@dataclass(frozen=True)
class TrainingResult:
    """Result of a launch of a run; equal on every rank.

    directory: of the run. step: the last saved one; it is less than total_steps also if
    the run stopped early by ``evaluation.early_stopping``.
    stopped_by: the name of the signal that stopped it before its end, else None. export: the
    Hugging Face directory of a complete run that writes one. metrics: the last logged step,
    evaluation: the last evaluation, as lines of ``metrics.jsonl``; empty if there is none.
    """

    directory: Path
    step: int
    total_steps: int
    stopped_by: str | None = None
    export: Path | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """True if the run is at its end: at its last step, or stopped early by its evaluation."""
        return self.stopped_by is None

    @property
    def loss(self) -> float | None:
        """Loss of the last logged step, in nats per token; None if not finite, or if nothing was
        logged."""
        return self.metrics.get("loss")

    @property
    def held_out_loss(self) -> float | None:
        """Held-out loss of the last evaluation, in nats per token; None if there was none."""
        return self.evaluation.get("held_out_loss")

    @property
    def exit_code(self) -> int:
        """Exit code of train.py."""
        return EXIT_STOPPED if self.stopped_by is not None else 0
