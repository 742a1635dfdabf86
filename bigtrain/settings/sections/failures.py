"""Sections on what a run does about failures: hangs, slow ranks, steps that went wrong."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from bigtrain.settings.sections.base import NonNegativeInt, PositiveInt, Section

Seconds = Annotated[float, Field(gt=0)]
ARRIVAL_TIMEOUT_SECONDS = 600.0
COLLECTIVE_TIMEOUT_SECONDS = 1800.0


class WatchdogSection(Section):
    """When a run that does not move is ended, and which rank is called slow."""

    timeout_seconds: Seconds | None = Field(
        default=600.0,
        description="without progress of any rank, after which all say where they are and end "
        "(exit code 76); null turns the watchdog off",
    )
    slow_timeout_seconds: Seconds = Field(
        default=1800.0,
        description="the same while the run starts, in its first step, while it waits for a save "
        "to be written and while it exports, where one operation may take long",
    )
    rendezvous_timeout_seconds: Seconds = Field(
        default=ARRIVAL_TIMEOUT_SECONDS,
        description="for all ranks to connect at the start, after which those that have not "
        "are named and the rest end",
    )
    collective_timeout_seconds: Seconds = Field(
        default=COLLECTIVE_TIMEOUT_SECONDS,
        description="for one collective operation, after which it fails on the ranks that wait in "
        "it; what one rank does alone (exports, checks of data) is not waited for in one",
    )
    straggler_factor: Annotated[float, Field(gt=1)] = Field(
        default=1.5,
        description="a rank whose own work takes more than this many times the median of its "
        "peers is named in the log",
    )
    straggler_seconds: Seconds = Field(
        default=60.0, description="of training over which that work is averaged, at least"
    )


class GuardSection(Section):
    """Which steps are left out, and when a run goes back."""

    enabled: bool = Field(
        default=True,
        description="leave out the update of a step whose loss or gradient norm is not finite",
    )
    spike_sigma: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="also leave out a step whose loss or gradient norm is more than this many "
        "standard deviations (told by the median absolute deviation) above the median of the "
        "recent steps; default: not looked for",
    )
    window: Annotated[int, Field(ge=2)] = Field(
        default=100, description="recent steps that a spike is compared with; before, none is one"
    )
    max_consecutive: PositiveInt = Field(
        default=10,
        description="bad steps in a row after which the run goes back to the last checkpoint "
        "before them, and on with the samples after them",
    )
    max_rollbacks: NonNegativeInt = Field(
        default=3, description="how often it goes back to the same checkpoint before it ends"
    )
