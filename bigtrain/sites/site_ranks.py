"""Collectives over the ranks of this site, in a separate group next to the training group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from bigtrain.engine.startup.cpu_collectives import cpu_group
from bigtrain.engine.startup.long_work import on_all_ranks
from bigtrain.system.world import World

# A rank that ends makes all ranks end; the main rank may wait long for other sites.
_TIMEOUT_SECONDS = 7 * 86400.0

Result = TypeVar("Result")


class SiteRanks:
    """The ranks of this site. All methods are collective, and may run in a thread next to training;
    an error on any rank is raised on all ranks."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._group = cpu_group(_TIMEOUT_SECONDS) if world.size > 1 else None

    @property
    def rank(self) -> int:
        """The rank of this process in its site."""
        return self._world.rank

    def agreed(self, work: Callable[[], Result]) -> Result:
        """Return the result of `work` on this rank."""
        return on_all_ranks(work, self._group)

    def on_main(self, work: Callable[[], Result]) -> Result:
        """Return the result of `work` on the main rank, on all ranks."""
        box: list[Any] = [self.agreed(lambda: work() if self._world.is_main else None)]
        if self._group is not None:
            dist.broadcast_object_list(box, src=0, group=self._group)
        result: Result = box[0]
        return result

    def gathered(self, value: Result) -> list[Result]:
        """Return `value` of every rank."""
        everyones: list[Any] = [value]
        if self._group is not None:
            everyones = [None] * self._world.size
            dist.all_gather_object(everyones, value, group=self._group)
        return everyones

    def sums(self, *values: float) -> list[float]:
        """Return the sums of `values` over the ranks."""
        return [sum(rank_values) for rank_values in zip(*self.gathered(values), strict=True)]
