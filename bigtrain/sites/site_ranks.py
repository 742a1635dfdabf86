"""Collectives over the ranks of this site, in a separate group next to the training group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from bigtrain.engine.startup.cpu_collectives import cpu_group
from bigtrain.engine.startup.long_work import on_all_ranks
from bigtrain.system.world import World

# Long: the main rank may wait for other sites, and the end of a rank ends all ranks anyway.
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

    def on_all(self, work: Callable[[], Result]) -> Result:
        """Call `work` on every rank; return this rank's result."""
        return on_all_ranks(work, self._group)

    def on_main(self, work: Callable[[], Result]) -> Result:
        """Call `work` on the main rank only; return its result on all ranks."""
        broadcast: list[Any] = [self.on_all(lambda: work() if self._world.is_main else None)]
        if self._group is not None:
            dist.broadcast_object_list(broadcast, src=0, group=self._group)
        result: Result = broadcast[0]
        return result

    def all_gather(self, value: Result) -> list[Result]:
        """Return the `value` of every rank, in the order of the ranks."""
        values: list[Any] = [value]
        if self._group is not None:
            values = [None] * self._world.size
            dist.all_gather_object(values, value, group=self._group)
        return values

    def sums(self, *values: float) -> list[float]:
        """Return the sums of `values` over the ranks."""
        return [sum(rank_values) for rank_values in zip(*self.all_gather(values), strict=True)]
