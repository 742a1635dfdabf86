"""Work whose errors reach every rank, and work for which ranks wait however long it takes.

A collective ends every rank that waits longer in it than the process group's timeout. In
`LongWork` they look at the launcher's store until the work is done, and meet in a collective only
then. Whoever works may die: the launcher ends the others, or the store is gone with the main rank,
or the watchdog sees that nothing moves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch.distributed as dist

from bigtrain.errors import BigtrainError, LaunchError
from bigtrain.models.torch_patches import default_store
from bigtrain.system.world import World

_LONGEST_PAUSE_SECONDS = 0.5

Result = TypeVar("Result")


class LongWork:
    """Of a process group. Methods are collective, and called in the same order by every rank.

    `token`: equal on all ranks, and another for every start of the processes, which torchrun's
    store outlives.
    """

    def __init__(self, world: World, token: str) -> None:
        self._world = world
        self._token = token
        self._num_done = 0

    def on_main_rank(self, work: Callable[[], Result]) -> Result:
        """What `work` returned on rank 0, on every rank. Its error is raised on every rank."""
        if self._world.size == 1:
            return work()
        outcome = _attempt(work) if self._world.is_main else None
        self._wait(1, takes_part=self._world.is_main)
        result: Result = _told(outcome, None)
        return result

    def on_every_rank(self, work: Callable[[], Result]) -> list[Result]:
        """What `work` returned on each rank, in their order, on every rank; errors likewise."""
        own = _attempt(work)
        outcomes: list[Any] = [own]
        if self._world.size > 1:
            self._wait(self._world.size, takes_part=True)
            outcomes = [None] * self._world.size
            dist.all_gather_object(outcomes, _sent(own))
            outcomes[self._world.rank] = own
        return _opened(outcomes)

    def _wait(self, num_ranks: int, *, takes_part: bool) -> None:
        """Until so many ranks are here. Raises LaunchError where the store is gone."""
        store = default_store()
        self._num_done += 1
        key = f"bigtrain/{self._token}/{self._num_done}"
        try:
            here = store.add(key, int(takes_part))
            pause = 0.001
            while here < num_ranks:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                here = store.add(key, 0)
        except dist.DistError as error:
            raise LaunchError(
                f"the main rank ended while rank {self._world.rank} waited for it: see what it "
                f"says ({error})"
            ) from error


def on_main_rank(work: Callable[[], Result], group: dist.ProcessGroup | None = None) -> Result:
    """What `work` returned on rank 0, on every rank; its error is raised on every rank.

    Collective over `group`, of all ranks, in which the others wait: for what takes no longer than
    other collectives (else `LongWork`), and in a thread where that group is used there alone.
    """
    result: Result = _told(_attempt(work) if dist.get_rank() == 0 else None, group)
    return result


def together(
    work: Callable[[], Result],
    group: dist.ProcessGroup | None = None,
    joined: Callable[[Sequence[BaseException]], BaseException] = lambda errors: errors[0],
) -> Result:
    """What `work` returned on this rank; every rank raises what `joined` makes of all errors.

    Collective over `group`. `joined` gets the errors in the order of the ranks, at least one.
    """
    result, error = _attempt(work)
    everyone: list[BaseException | None] = [error]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, _sendable(error), group=group)
        everyone[dist.get_rank(group)] = error
    if errors := [found for found in everyone if found is not None]:
        raise joined(errors)
    return cast(Result, result)


def _told(outcome: _Outcome | None, group: dist.ProcessGroup | None) -> Any:
    box = [_sent(outcome)]
    dist.broadcast_object_list(box, src=0, group=group)
    found = box[0] if outcome is None else outcome
    assert found is not None
    return _opened([found])[0]


_Outcome = tuple[Any, BaseException | None]


def _attempt(work: Callable[[], Any]) -> _Outcome:
    try:
        return work(), None
    except BaseException as error:  # KeyboardInterrupt too: others wait
        return None, error


def _sent(outcome: _Outcome | None) -> _Outcome | None:
    return outcome and (outcome[0], _sendable(outcome[1]))


def _sendable(error: BaseException | None) -> BaseException | None:
    """What other ranks get: of errors that are bugs the text, for they may hold anything."""
    if error is None or isinstance(error, BigtrainError):
        return error
    return LaunchError(f"another rank failed: {error!r}")


def _opened(outcomes: list[_Outcome]) -> list[Any]:
    for _, error in outcomes:
        if error is not None:
            raise error
    return [result for result, _ in outcomes]
