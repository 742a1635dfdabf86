"""Log of a run: its lines, metrics and events, which the main rank writes."""

from __future__ import annotations

import sys

from bigtrain.errors import BigtrainError, LostRunTokenError
from bigtrain.run.health.fencing import RunClaim
from bigtrain.run.reporting.metrics import MetricsWriter
from bigtrain.run.state import TrainState
from bigtrain.settings.run_config import RunConfig


class RunLog:
    """Log of a run; only the main rank writes. Calls no collective. metrics: the main rank's, from
    `open` on; earlier lines are kept until then, so that a refused run writes nothing."""

    def __init__(self, claim: RunClaim, *, is_main: bool) -> None:
        self._claim = claim
        self._is_main = is_main
        self._early_lines: list[str] = []
        self._early_file_lines: list[str] = []
        self.metrics: MetricsWriter | None = None

    def open(self, config: RunConfig, state: TrainState) -> None:
        """Open metrics and log at `state`, on the main rank. Raises LaunchError if a tracker cannot
        start."""
        self.metrics = MetricsWriter(
            self._claim.run_directory,
            total_steps=config.train.total_steps,
            trackers=config.logging.trackers,
            project=config.logging.project,
            run_config=config.model_dump(mode="json"),
            resume_step=state.step,
            resume_samples=state.samples,
            is_stale=self._claim.is_lost,
        )
        while self._early_lines:
            self.metrics.info(self._early_lines.pop(0))
        while self._early_file_lines:
            self.metrics.note(self._early_file_lines.pop(0))

    def info(self, text: str) -> None:
        """Show a line, and write it to log.txt as soon as that is open."""
        if self.metrics is not None:
            self.metrics.info(text)
        elif self._is_main and text not in self._early_lines:
            # The checkpoints are read a second time if the newest is corrupt, or if an
            # earlier launch has saved since: skip repeated lines.
            self._early_lines.append(text)

    def to_file(self, text: str) -> None:
        """Write a line to log.txt only, as soon as that is open."""
        if self.metrics is not None:
            self.metrics.note(text)
        elif self._is_main:
            self._early_file_lines.append(text)

    def event(self, event: str, state: TrainState, *, first_sample: int, **details: object) -> None:
        """Write an event at `state` about the samples from `first_sample` on."""
        if self.metrics is not None:
            samples = {"first_sample": first_sample, "num_samples": state.samples - first_sample}
            self.metrics.log_event(event, step=state.step, **samples, **details)

    def failure(self) -> BigtrainError | None:
        """Return the error after which the main rank cannot write, or None; checked twice a
        second."""
        failure = None if self.metrics is None else self.metrics.failure
        if failure is not None or self._claim.is_lost():
            try:
                self._claim.check()  # raises with the cause
            except LostRunTokenError as error:
                return error
        return failure

    def close(self) -> None:
        """Close what is open, and print the lines not shown yet. May be called again."""
        if self.metrics is not None:
            self.metrics.close()
        for text in self._early_lines:
            print(text, file=sys.stderr, flush=True)
        self._early_lines.clear()
