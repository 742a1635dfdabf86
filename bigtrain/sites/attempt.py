"""One attempt at an outer step, as one rank of a site sees it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from bigtrain.sites.metrics import OuterEvent
from bigtrain.sites.protocol import StepRecord


class BucketState(NamedTuple):
    """Global weights and outer momentum of a bucket, float32 [N]."""

    weights: torch.Tensor
    momentum: torch.Tensor | None


@dataclass
class SquareSums:
    """Sums of squares of the site's change, and of its distance to the mean, on this rank."""

    change: float = 0.0
    distance: float = 0.0
    num_elements: int = 0


@dataclass
class Attempt:
    """An attempt at an outer step with `fragment`, after `step` optimizer steps.

    Inputs: fragment (None: only take the weights of other sites), last_step (of the run), is_last
    (whether this site exchanges nothing after it), number and tokens_seen (of the site's global
    weights), tokens (trained on since the fragment's last exchange), local (masters by bucket, if
    they change before the attempt ends; else empty).

    Results: exactly one of record (of the outer step, which counts on all members), detach_reason
    (why this site trains without outer steps) and failure (why the attempt does not count).
    received: by bucket of the model, what this site takes from other sites, empty on a rank without
    buckets; None if the site takes nothing. means, errors: by bucket of the fragment, the mean of
    this rank's share and the new rounding errors (None: unchanged). waited: seconds of waiting for
    other sites.
    """

    fragment: int | None
    step: int
    last_step: int = 0
    is_last: bool = False
    number: int = 0
    tokens_seen: int = 0
    tokens: int = 0
    local: Sequence[torch.Tensor] = ()

    record: StepRecord | None = None
    detach_reason: str = ""
    failure: str = ""
    received: list[BucketState] | None = None
    means: list[torch.Tensor] = field(default_factory=list)
    errors: Sequence[torch.Tensor | None] = ()
    squares: SquareSums = field(default_factory=SquareSums)
    events: list[OuterEvent] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_bytes: int = 0
    waited: float = 0.0
    seconds: float = 0.0

    future: Future[None] | None = None  # of a thread next to training, until `OuterStep.settle`

    @property
    def has_received(self) -> bool:
        """Whether the attempt counts, and this site takes the weights of other sites."""
        return self.record is not None and self.received is not None
