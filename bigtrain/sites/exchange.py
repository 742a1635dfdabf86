"""The mean over sites of the weights that ranks of different sites hold alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bigtrain.sites.codecs import Codec
from bigtrain.sites.contribution import (
    PART_SLACK,
    UnusableError,
    UnusableSiteError,
    decoded,
    refuse_norm,
)
from bigtrain.sites.metrics import square
from bigtrain.sites.outer_state import OuterState, Window


class Exchange:
    """Takes means over the ranks of `group`, one of each site, in the order of the sites.

    group: a `ProcessGroupGloo` beside the default one; None where this site is the only one.
    weights: how much each site counts, which may change. num_bytes: sent so far, without headers.
    """

    def __init__(self, group: Any, weights: Sequence[int]) -> None:
        assert (group is None) == (len(weights) == 1)
        self._group = group
        self.weights = weights
        self.num_bytes = 0

    def give(self, tensor: torch.Tensor, giver: int, takers: Sequence[int]) -> None:
        """Overwrite the `tensor` of `takers` by that of `giver`, of the same size: contiguous on
        the CPU, sites by their positions in the group. Raises RuntimeError if a site is gone."""
        if self._group is None or not tensor.numel():
            return
        own = self._group.rank()
        if own == giver:
            for taker in takers:
                self._group.send([tensor], taker, 0).wait()
                self.num_bytes += tensor.nbytes
        elif own in takers:
            self._group.recv([tensor], giver, 0).wait()

    def mean(
        self,
        codec: Codec,
        local: torch.Tensor,
        weights: torch.Tensor,
        error: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The mean of all sites' `local` weights, which `local` may be.

        Parameters: `local`, `weights` (global, the same on all sites), float32 [N] on the CPU;
        `error` [N], what rounding has lost so far, which is added to what this site sends, and
        overwritten by what is lost now; None for a codec that keeps none.

        Every site computes the mean of one part, in float64 and in the order of the sites, and
        sends its code to all: all sites get the same bits, without the intermediate rounding of a
        ring. Collective over the group. Raises RuntimeError if a site is gone or too slow,
        UnusableSiteError for values that are not finite, or moved too far, on the rank that gets
        them.
        """
        if self._group is None:
            return local
        sites, length = len(self.weights), len(local)
        part = -(-length // sites)
        values = torch.zeros(sites * part)
        values[:length] = local - weights if codec.is_relative else local
        if error is not None:
            values[:length] += error
        codes = codec.encode(values.view(sites, part))
        everyones = torch.empty_like(codes)
        self._group.alltoall_base(everyones, codes, [], []).wait()
        total = torch.zeros(1, part, dtype=torch.float64)
        before = _part(weights, self._group.rank(), part)
        for position, weight in enumerate(self.weights):
            values_of_site = _checked(codec, everyones[position], part, position, before)
            total.add_(values_of_site.double(), alpha=weight)
        total /= sum(self.weights)
        own = codec.encode(total)
        if error is not None:
            lost = values.view(sites, part) - codec.decode(codes, part)
            # Of the mean as well, as what only this site has lost.
            index = self._group.rank()
            share = self.weights[index] / sum(self.weights)
            if share:
                lost[index] += (total[0] - codec.decode(own, part)[0]) / share
            error.copy_(lost.view(-1)[:length])
        found = torch.empty_like(codes)
        self._group.allgather([list(found)], [own[0]]).wait()
        self.num_bytes += 2 * (sites - 1) * own.numel()
        rows = [
            _checked(codec, row, part, position, _part(weights, position, part))
            for position, row in enumerate(found)
        ]
        mean = torch.cat(rows).reshape(-1)[:length]
        return mean.add_(weights) if codec.is_relative else mean


def _part(weights: torch.Tensor, position: int, part: int) -> torch.Tensor:
    """The global weights [part] of which a site takes the mean; zeros beyond the end."""
    own = weights[position * part : (position + 1) * part]
    return torch.nn.functional.pad(own, (0, part - len(own)))


def _checked(
    codec: Codec, codes: torch.Tensor, part: int, position: int, before: torch.Tensor
) -> torch.Tensor:
    """The values [1, part] that a site has sent. Raises UnusableSiteError."""
    try:
        values = decoded(codec, codes.unsqueeze(0), part)
        change = square(values, torch.zeros(()) if codec.is_relative else before)
        refuse_norm(change, square(before, torch.zeros(())), part, PART_SLACK)
    except UnusableError as error:
        raise UnusableSiteError(position, str(error)) from error
    return values


class ShardExchange:
    """Takes means over sites whose ranks of the same number hold the same part of the model.

    `RectangleExchange` does so for other layouts, with the same methods.
    """

    def __init__(self, state: OuterState, exchange: Exchange) -> None:
        self._state = state
        self._exchange = exchange

    @property
    def num_bytes(self) -> int:
        """Sent so far, without headers."""
        return self._exchange.num_bytes

    def weigh(self, weights: Sequence[int]) -> None:
        """Count sites so much from now on."""
        self._exchange.weights = weights

    def means(
        self,
        fragment: int,
        windows: Sequence[Window],
        local: Sequence[torch.Tensor | None],
        weights: Sequence[torch.Tensor],
        errors: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor]:
        """By window of a fragment the mean of what this rank exchanges of it.

        Parameters, each by window, float32 [N]: `local`, the weights of this site, None for the
        masters as they are; `weights`, the global ones; `errors`, what rounding has lost so far,
        overwritten by what is lost now. Collective over the group, not over the site. Raises
        RuntimeError if a site is gone or too slow.
        """
        found = []
        for window, given, before, error in zip(windows, local, weights, errors, strict=True):
            own = self._state.own(len(before))
            part = (window.gathered() if given is None else given)[own]
            lost = None if error is None else error[own]
            found.append(self._exchange.mean(window.codec, part, before[own], lost))
        return found

    def give(
        self,
        fragment: int,
        windows: Sequence[Window],
        tensors: Sequence[torch.Tensor],
        giver: int,
        takers: Sequence[int],
    ) -> None:
        """Give `takers` what this rank exchanges of `tensors`, float32 [N] by window of a fragment;
        as `Exchange.give`."""
        for tensor in tensors:
            self._exchange.give(tensor[self._state.own(len(tensor))], giver, takers)
