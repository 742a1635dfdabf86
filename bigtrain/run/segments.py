"""Segments of a run: the steps of every phase of ``batch.phases``, and the steps after the last
phase.

A segment is trained by a separate engine, and begins like a launch that resumes from the checkpoint
at the end of the previous segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from signal import Signals

from bigtrain.data.shards.dataset import Level
from bigtrain.errors import ConfigError, Problem
from bigtrain.run.length import with_steps
from bigtrain.run.preflight import Inputs, inspect_inputs
from bigtrain.settings.batch_plan import in_phase
from bigtrain.settings.resolve import ResolvedRun


@dataclass(frozen=True)
class Segment:
    """Steps `begin` + 1 to `end` of a run. run: with the batch of the segment."""

    begin: int
    end: int
    run: ResolvedRun
    inputs: Inputs

    def describe(self) -> str:
        """Return the segment as one line."""
        return f"steps {self.begin + 1} to {self.end}: {self.run.plan.equation()}"


@dataclass(frozen=True)
class Finished:
    """The run is at its end after `step`; None: it was complete before this launch."""

    step: int | None


@dataclass(frozen=True)
class Interrupted:
    """A signal has stopped the run after `step`."""

    step: int
    signal: Signals


@dataclass(frozen=True)
class ContinueAt:
    """Another engine has to continue the run after `step`."""

    step: int


Outcome = Finished | Interrupted | ContinueAt
"""Outcome of training a segment."""


def inspect_segments(
    run: ResolvedRun, check: Level = "sizes", samples: object = None
) -> tuple[tuple[Segment, ...], tuple[str, ...]]:
    """Inspect the inputs of every segment of `run`, a single one without phases; return them, and
    lines on epochs counted as steps. Raises as `inspect_inputs`, with the keys of phases."""
    if not run.phases:
        inputs = inspect_inputs(run, check, samples)
        counted, lines = with_steps(run, inputs.datasets)
        return (Segment(0, counted.config.train.total_steps, counted, inputs),), lines
    # The steps after the last phase are a segment, too: `run.phases` has an entry for them.
    ends = (*run.config.batch.ends(), run.config.train.total_steps)
    segments: list[Segment] = []
    problems: list[Problem] = []
    begin = 0
    for number, (end, phase) in enumerate(zip(ends, run.phases, strict=True)):
        try:
            if begin < end:
                inputs = inspect_inputs(phase, check, samples)
                segments.append(Segment(begin, end, phase, inputs))
        except ConfigError as error:
            problems += in_phase(run.config, number, error.problems, problems)
        begin = end
    if problems:
        raise ConfigError(problems, "the run's inputs")
    return tuple(segments), ()


def segment_at(segments: Sequence[Segment], step: int) -> Segment:
    """Return the segment that a run continues with after `step` steps; the last one at its end."""
    return next((segment for segment in segments if step < segment.end), segments[-1])
