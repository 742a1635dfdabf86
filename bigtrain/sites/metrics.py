"""Metrics and events of an outer step."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class OuterStepMetrics:
    """Metrics of an outer step, equal on all ranks of a site.

    number: of the outer step, from 1. fragment: the part of the model that was exchanged. sites:
    that took part. sent_bytes: by all ranks of this site. link_bytes: the most that a rank sent to
    another site, or to the server. seconds: duration on this rank, including `waited_seconds` for
    other sites (with an overlap, the time that training waited for the outer step). change: root
    mean square of this site's change to the global weights since the last outer step. distance:
    root mean square of the difference between the site's weights and the mean over sites; None
    where an asynchronous server takes no mean.
    """

    number: int
    fragment: int
    sites: tuple[int, ...]
    sent_bytes: int
    link_bytes: int
    seconds: float
    waited_seconds: float
    change: float
    distance: float | None


ALONE, LEFT_OUT, RETURNED, MESSAGE_REFUSED = (
    "site_alone",
    "site_left_out",
    "site_returned",
    "message_refused",
)
"""Kinds of `OuterEvent`: a site is on its own; its change is not in an outer step; it is back; the
server has refused a message."""


@dataclass(frozen=True)
class OuterEvent:
    """Event between outer steps. who: the site, or the host that sent a message; outer_step: the
    last outer step at that time; count: how often since the outer step before."""

    event: str
    who: str
    reason: str
    outer_step: int
    count: int = 1


def square(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the sum of the squares of the elements of ``first - second``."""
    return float(torch.linalg.vector_norm(first - second, dtype=torch.float64)) ** 2
