"""Sections on how a run handles failures: hangs, slow ranks, bad steps."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from bigtrain.settings.sections.base import NonNegativeInt, PositiveInt, Section

Seconds = Annotated[float, Field(gt=0)]
RENDEZVOUS_TIMEOUT_SECONDS = 600.0
COLLECTIVE_TIMEOUT_SECONDS = 1800.0


class WatchdogSection(Section):
    """When a run without progress is ended, and which ranks are reported as slow."""

    timeout_seconds: Seconds | None = Field(
        default=600.0,
        description="without progress of any rank, after which all ranks dump their stacks and "
        "exit (exit code 76); null turns the watchdog off",
    )
    slow_timeout_seconds: Seconds = Field(
        default=1800.0,
        description="the same while the run starts, in its first step, while it waits for a save "
        "to be written and while it exports, where one operation may take long",
    )
    rendezvous_timeout_seconds: Seconds = Field(
        default=RENDEZVOUS_TIMEOUT_SECONDS,
        description="for all ranks to join at the start, after which the missing ranks are named "
        "and the others exit",
    )
    collective_timeout_seconds: Seconds = Field(
        default=COLLECTIVE_TIMEOUT_SECONDS,
        description="for one collective operation, after which it fails on the ranks that wait in "
        "it; work that one rank does alone (exports, checks of data) is not waited for in a "
        "collective",
    )
    straggler_factor: Annotated[float, Field(gt=1)] = Field(
        default=1.5,
        description="a rank whose own work takes more than this many times the median of its "
        "peers is named in the log",
    )
    straggler_seconds: Seconds = Field(
        default=60.0, description="shortest training time over which that work is averaged"
    )


class GuardSection(Section):
    """Which updates are skipped, and when a run is rolled back."""

    enabled: bool = Field(
        default=True,
        description="skip the update of a step whose loss or gradient norm is not finite",
    )
    spike_sigma: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="also skip the update of a step whose loss or gradient norm is more than this "
        "many standard deviations (estimated by the median absolute deviation) above the median of "
        "the recent steps; default: off",
    )
    window: Annotated[int, Field(ge=2)] = Field(
        default=100,
        description="recent steps that a spike is compared with; until there are as many, no step "
        "is a spike",
    )
    max_consecutive: PositiveInt = Field(
        default=10,
        description="bad steps in a row after which the run is rolled back to the last checkpoint "
        "before them, and continues with the samples after them",
    )
    max_rollbacks: NonNegativeInt = Field(
        default=3, description="rollbacks to the same checkpoint after which the run fails"
    )
