"""A run as user code sees it: its state in callbacks, and the result of a launch. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bigtrain.errors import EXIT_STOPPED
from bigtrain.settings.run_config import RunConfig


@dataclass
class Requests:
    """Requests that callbacks of this rank made since they were last read."""

    stop: str | None = None
    save: bool = False


@dataclass(frozen=True)
class RunView:
    """State of a run as a callback sees it; nothing in it can be changed.

    step, samples, tokens: trained so far. metrics: the last logged step, as a line of
    ``metrics.jsonl``, on the main rank; evaluation: the metrics of the last evaluation of this
    launch; empty before the first logged step or evaluation. directory: of the run. config:
    its settings. checkpoint: at the point `checkpoint`, the directory that was written. stopped_by:
    at the point `end`, the name of the signal that stopped the run, or None. error: at the point
    `close`, the text of the error that ends the launch on this rank, or None.
    """

    step: int
    samples: int
    tokens: int
    metrics: Mapping[str, Any]
    evaluation: Mapping[str, float]
    directory: Path
    config: RunConfig
    rank: int
    world_size: int
    checkpoint: Path | None = None
    stopped_by: str | None = None
    error: str | None = None
    _requests: Requests = field(default_factory=Requests, repr=False)

    def request_stop(self, reason: str = "") -> None:
        """Ask to end the run here: it evaluates, saves and exports as after its last step. From
        `step` and `evaluation` it takes effect at once; from other points, after the next step."""
        if self.config.sites is not None:
            raise ValueError("one of several sites cannot end the run: the others would wait")
        self._requests.stop = str(reason)

    def request_save(self) -> None:
        """Ask for a checkpoint of this step; from `start` and `checkpoint`, of the next one."""
        self._requests.save = True


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
