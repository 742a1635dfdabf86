"""The mean over sites of the weights that the same rank of each site holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bigtrain.engine.sites.codecs import Codec


class Exchange:
    """Takes means over the ranks of `group`, one of each site, in the order of the sites.

    group: a `ProcessGroupGloo` beside the default one; None where this site is the only one.
    weights: how much each site counts. num_bytes: sent so far, without headers.
    """

    def __init__(self, group: Any, weights: Sequence[int]) -> None:
        assert (group is None) == (len(weights) == 1)
        self._group = group
        self._weights = weights
        self.num_bytes = 0

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
        ring. Collective over the group. Raises RuntimeError if a site is gone or too slow.
        """
        if self._group is None:
            return local
        sites, length = len(self._weights), len(local)
        part = -(-length // sites)
        values = torch.zeros(sites * part)
        values[:length] = local - weights if codec.is_relative else local
        if error is not None:
            values[:length] += error
        codes = codec.encode(values.view(sites, part))
        everyones = torch.empty_like(codes)
        self._group.alltoall_base(everyones, codes, [], []).wait()
        total = torch.zeros(1, part, dtype=torch.float64)
        for codes_of_site, weight in zip(everyones, self._weights, strict=True):
            values_of_site = codec.decode(codes_of_site.unsqueeze(0), part)
            total.add_(values_of_site.double(), alpha=weight)
        total /= sum(self._weights)
        own = codec.encode(total)
        if error is not None:
            lost = values.view(sites, part) - codec.decode(codes, part)
            # Of the mean as well, as what only this site has lost.
            index = self._group.rank()
            share = self._weights[index] / sum(self._weights)
            lost[index] += (total[0] - codec.decode(own, part)[0]) / share
            error.copy_(lost.view(-1)[:length])
        found = torch.empty_like(codes)
        self._group.allgather([list(found)], [own[0]]).wait()
        self.num_bytes += 2 * (sites - 1) * own.numel()
        mean = codec.decode(found, part).reshape(-1)[:length]
        return mean.add_(weights) if codec.is_relative else mean
