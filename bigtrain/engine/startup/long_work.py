"""Work whose errors reach every rank, and work for which ranks wait however long it takes.

A collective ends every rank that waits longer than the process group's timeout. In `LongWork` ranks
poll the launcher's store instead. If the working rank dies, the launcher ends all ranks, the store
disappears with the main rank, or the watchdog detects a hang.
"""

from __future__ import annotations

import operator
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch.distributed as dist

from bigtrain.engine.startup.cpu_collectives import combine_on_main
from bigtrain.errors import BigtrainError, LaunchError
from bigtrain.models.torch_patches import default_store
from bigtrain.system.world import World

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.001, 0.5
# Polls a second of all ranks together, at first and in the long run: the store has one thread, in
# the main rank or in torchrun's agent, which needs some 7 us for a poll.
_FIRST_POLLS_PER_SECOND, _POLLS_PER_SECOND = 1 << 16, 1 << 12

Result = TypeVar("Result")


class LongWork:
    """Long work of a world. Methods are collective, and every rank calls them in one order.
    `token`: equal on all ranks, and new at every launch, since torchrun's store outlives a
    restart."""

    def __init__(self, world: World, token: str) -> None:
        self._world = world
        self._token = token
        self._num_done = 0

    def on_main_rank(self, work: Callable[[], Result]) -> Result:
        """Run `work` on rank 0; return the result, or raise the error, on every rank."""
        if self._world.size == 1:
            return work()
        outcome = _attempt(work) if self._world.is_main else None
        self._wait(1, takes_part=self._world.is_main)
        result: Result = _broadcast(outcome, None)
        return result

    def on_every_rank(self, work: Callable[[], Result]) -> list[Result]:
        """Run `work` on every rank; return all results in rank order, or raise the first error, on
        every rank."""
        outcome = _attempt(work)
        outcomes: list[Any] = [outcome]
        if self._world.size > 1:
            self._wait(self._world.size, takes_part=True)
            outcomes = [None] * self._world.size
            result, error = outcome
            dist.all_gather_object(outcomes, (result, _picklable_error(error)))
            outcomes[self._world.rank] = outcome  # the error as it was raised on this rank
        return _unwrap(outcomes)

    def _wait(self, num_ranks: int, *, takes_part: bool) -> None:
        """Wait until `num_ranks` ranks have done this work; `takes_part`: whether this rank is one
        of them. Raises LaunchError if the store is gone."""
        store = default_store()
        self._num_done += 1
        key = f"bigtrain/{self._token}/{self._num_done}"
        try:
            num_arrived = store.add(key, int(takes_part))
            pauses = _pauses(self._world.size)
            while num_arrived < num_ranks:
                time.sleep(next(pauses))
                num_arrived = store.add(key, 0)
        except dist.DistError as error:
            raise LaunchError(
                f"the main rank ended while rank {self._world.rank} waited for it: see its "
                f"output ({error})"
            ) from error


def _pauses(num_ranks: int) -> Iterator[float]:
    """Yield the seconds between the polls of a rank, with jitter so that `num_ranks` ranks do not
    poll at once."""
    pause = max(_FIRST_PAUSE_SECONDS, num_ranks / _FIRST_POLLS_PER_SECOND)
    longest = max(_LONGEST_PAUSE_SECONDS, num_ranks / _POLLS_PER_SECOND)
    jitter = random.Random()  # a separate generator: the run's generators must not change
    while True:
        yield pause * jitter.uniform(0.75, 1.25)
        pause = min(2 * pause, longest)


def on_main_rank(work: Callable[[], Result], group: dist.ProcessGroup | None = None) -> Result:
    """Run `work` on rank 0; return the result, or raise the error, on every rank. Collective over
    `group`, a group of the world, in which all other ranks wait: only for work that takes no longer
    than other collectives (else use `LongWork`). In a thread, no other thread may use `group`."""
    result: Result = _broadcast(_attempt(work) if dist.get_rank() == 0 else None, group)
    return result


def on_every_rank(work: Callable[[], Result]) -> list[Result]:
    """Run `work` on every rank; return all results in rank order, or raise the first error, on
    every rank. Collective, as `on_main_rank`."""
    outcomes: list[Any] = [None] * dist.get_world_size()
    result, error = _attempt(work)
    dist.all_gather_object(outcomes, (result, _picklable_error(error)))
    return _unwrap(outcomes)


def on_all_ranks(
    work: Callable[[], Result],
    group: dist.ProcessGroup | None = None,
    joined: Callable[[Sequence[BaseException]], BaseException] = lambda errors: errors[0],
) -> Result:
    """Return the result of `work` on this rank; if any rank fails, every rank raises the result of
    `joined` for all errors, in the order of the ranks. Collective over `group`."""
    result, error = _attempt(work)
    # Errors by rank.
    errors = {} if error is None else {0: error}
    if dist.is_initialized():
        rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        sent_error = _picklable_error(error)
        if dist.get_backend(group) == "gloo" and num_ranks == dist.get_world_size():
            # In a CPU group of the world, combine errors along a tree, with few small messages.
            rank_errors = {} if sent_error is None else {rank: sent_error}
            shared: list[Any] = [combine_on_main(rank_errors, operator.ior, group)]
            dist.broadcast_object_list(shared, src=0, group=group)
            errors = shared[0]
        else:
            gathered: list[BaseException | None] = [None] * num_ranks
            dist.all_gather_object(gathered, sent_error, group=group)
            errors = {peer: e for peer, e in enumerate(gathered) if e is not None}
        if error is not None:
            errors[rank] = error  # as it was raised on this rank
    if errors:
        raise joined([errors[rank] for rank in sorted(errors)])
    return cast(Result, result)


def _broadcast(outcome: _Outcome | None, group: dist.ProcessGroup | None) -> Any:
    """Return the result of rank 0, or raise the error, on every rank. outcome: None except on rank
    0. Collective."""
    sent: list[_Outcome | None] = [None]
    if outcome is not None:
        result, error = outcome
        sent = [(result, _picklable_error(error))]
    dist.broadcast_object_list(sent, src=0, group=group)
    received = sent[0] if outcome is None else outcome
    assert received is not None
    [result] = _unwrap([received])
    return result


_Outcome = tuple[Any, BaseException | None]
"""Result and error of work; one of them is None."""


def _attempt(work: Callable[[], Any]) -> _Outcome:
    try:
        return work(), None
    except BaseException as error:  # also KeyboardInterrupt: other ranks wait for the outcome
        return None, error


def _picklable_error(error: BaseException | None) -> BaseException | None:
    """Return the error for other ranks; unexpected exceptions as text, since they may not
    pickle."""
    if error is None or isinstance(error, BigtrainError):
        return error
    return LaunchError(f"another rank failed: {error!r}")


def _unwrap(outcomes: list[_Outcome]) -> list[Any]:
    """Return the results, or raise the first error."""
    for _, error in outcomes:
        if error is not None:
            raise error
    return [result for result, _ in outcomes]
