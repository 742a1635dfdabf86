"""How a launch of a run ended, with its closing figures. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bigtrain.errors import EXIT_STOPPED


@dataclass(frozen=True)
class TrainingResult:
    """How a launch of a run ended; equal on every rank.

    directory: of the run. step: the last one that is saved; it is less than total_steps also where
    the run stopped early, as ``evaluation.early_stopping`` says.
    stopped_by: the name of the signal that stopped it before its end, else None. export: the
    Hugging Face directory of a complete run that writes one. metrics: the last logged step,
    evaluation: the last evaluation, as lines of ``metrics.jsonl``; empty without one.
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
        """Whether the run is at its end: at its last step, or stopped early by its evaluation."""
        return self.stopped_by is None

    @property
    def loss(self) -> float | None:
        """Of the last logged step, in nats per token; None if not finite, or nothing was logged."""
        return self.metrics.get("loss")

    @property
    def held_out_loss(self) -> float | None:
        """Of the last evaluation, in nats per token; None without one."""
        return self.evaluation.get("held_out_loss")

    @property
    def exit_code(self) -> int:
        """What train.py ends with."""
        return EXIT_STOPPED if self.stopped_by is not None else 0
