"""Collectives over the ranks of this site, in a group apart from the one that trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from bigtrain.engine.startup.cpu_collectives import cpu_group
from bigtrain.engine.startup.long_work import on_all_ranks
from bigtrain.system.world import World

# A rank that ends ends the others at once; the main rank may wait long for other sites.
_TIMEOUT_SECONDS = 7 * 86400.0

Result = TypeVar("Result")


class SiteRanks:
    """The ranks of this site. All methods are collective, and may run in a thread next to training;
    an error of one rank is raised on all."""

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

    def gathered(self, own: Result) -> list[Result]:
        """Return `own` of every rank."""
        everyones: list[Any] = [own]
        if self._group is not None:
            everyones = [None] * self._world.size
            dist.all_gather_object(everyones, own, group=self._group)
        return everyones
