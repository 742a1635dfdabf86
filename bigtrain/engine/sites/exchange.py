"""The mean over sites of the weights that the same rank of each site holds."""

from __future__ import annotations

from typing import Any

import torch

from bigtrain.engine.sites.codecs import CODECS


class Exchange:
    """Takes means over the ranks of `group`, one of each site, in the order of the sites.

    group: a `ProcessGroupGloo` beside the default one; None where this site is the only one.
    num_bytes: sent so far, without headers.
    """

    def __init__(self, group: Any, num_sites: int, codec: str) -> None:
        assert (group is None) == (num_sites == 1)
        self._group = group
        self._num_sites = num_sites
        self._codec = CODECS[codec]
        self.num_bytes = 0

    def mean(self, local: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The mean of all sites' `local` weights, which `local` may be.

        Parameters: `local`, `weights` (global, the same on all sites), float32 [N] on the CPU.

        Every site computes the mean of one part, in float64 and in the order of the sites, and
        sends its code to all: all sites get the same bits, without the intermediate rounding of a
        ring. Collective over the group. Raises RuntimeError if a site is gone or too slow.
        """
        if self._group is None:
            return local
        sites = self._num_sites
        part = -(-len(local) // sites)
        codes = torch.zeros(sites * part, dtype=self._codec.dtype)
        codes[: len(local)] = self._codec.encode(local, weights)
        everyones = torch.empty_like(codes)
        self._group.alltoall_base(_as_bytes(everyones), _as_bytes(codes), [], []).wait()
        total = torch.zeros(part, dtype=torch.float64)
        for codes_of_site in everyones.view(sites, part):
            total += codes_of_site
        own = (total / sites).to(self._codec.dtype)
        parts = list(codes.view(sites, part))
        self._group.allgather([[_as_bytes(p) for p in parts]], [_as_bytes(own)]).wait()
        self.num_bytes += 2 * (sites - 1) * own.numel() * own.itemsize
        return self._codec.decode(codes[: len(local)], weights)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes: gloo does not support every dtype, and here it only copies."""
    return tensor.view(torch.uint8)
