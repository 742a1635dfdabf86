"""Limits on what a site contributes to an outer step and on what it takes from one: values that are
finite, and a change of bounded norm. No communication but the sum over a site's own ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from bigtrain.errors import TrainingError
from bigtrain.sites.codecs import Codec, is_finite
from bigtrain.sites.metrics import square

if TYPE_CHECKING:  # which imports DeepSpeed; the outer server does without
    from bigtrain.sites.outer_state import Bucket
    from bigtrain.sites.site_ranks import SiteRanks

MOST_CHANGE = 10.0
"""Limit of a site's change to the global weights: its root mean square, divided by 1 + the root
mean square of the weights. An inner optimizer moves a weight by about its learning rate at each
step: 1,000 steps at 1e-2 in one direction reach the limit for weights much smaller than 1."""
PART_SLACK = 100.0
"""Factor on `MOST_CHANGE` for the part of a change of which one rank takes the mean."""


class UnusableError(ValueError):
    """Values that no outer step may use."""


class UnusableSiteError(RuntimeError):
    """Values that another site has sent and no outer step may use. position: index of that site
    among the members of the round."""

    def __init__(self, position: int, text: str) -> None:
        super().__init__(text)
        self.position = position


def decoded(codec: Codec, codes: torch.Tensor, num_elements: int) -> torch.Tensor:
    """Return the float32 values [R, num_elements] of `codes`. Raises UnusableError for codes that
    no site makes from finite values."""
    if not codec.is_canonical(codes, num_elements):
        raise UnusableError("values or scales that are not finite, or integers out of range")
    values = codec.decode(codes, num_elements)
    if not is_finite(values):
        raise UnusableError("values that are not finite")
    return values


def refuse_norm(change: float, weights: float, count: int, slack: float = 1.0) -> None:
    """Raise UnusableError if a change is too large, or not finite.

    change, weights: sums of the squares of a site's change and of the global weights before it;
    count: number of elements.
    """
    change_rms = math.sqrt(change / max(1, count))
    weights_rms = math.sqrt(weights / max(1, count))
    if not math.isfinite(change_rms):
        raise UnusableError("a change with NaN or an infinity")
    max_ratio = slack * MOST_CHANGE
    if change_rms > max_ratio * (1 + weights_rms):
        raise UnusableError(
            f"a change of {change_rms:.4g} (root mean square) to weights of {weights_rms:.4g}, "
            f"more than {max_ratio:g} x (1 + {weights_rms:.4g})"
        )


def refuse_own_change(buckets: Iterable[Bucket], site: int, step: int, ranks: SiteRanks) -> None:
    """Raise TrainingError on every rank of this site if its change after `step` cannot be sent.
    Collective over the site."""
    change_square, weights_square, num_elements = 0.0, 0.0, 0
    for bucket in buckets:
        local = bucket.copy_masters()
        change_square += square(local, bucket.weights)
        weights_square += square(bucket.weights, torch.zeros(()))
        num_elements += len(local)
    change, weights, count = ranks.sums(change_square, weights_square, num_elements)
    try:
        refuse_norm(change, weights, int(count))
    except UnusableError as error:
        raise TrainingError(
            f"step {step}: site {site} would send the other sites {error}: it ends, and they "
            "continue without it -> start it again: it resumes from its newest checkpoint, whose "
            "weights are finite; if this comes again, lower optimizer.lr"
        ) from error
