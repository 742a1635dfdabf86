"""All ranks of a world in one process, each in a thread, which send each other real messages in
memory: what they pay together for a collective function. One thread runs at a time, until it waits
for a message. Rings and gathers on every rank are errors here: their messages grow with the
ranks."""

from __future__ import annotations

import gc
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

_STACK_BYTES = 1 << 20


@dataclass
class RankCost:
    """What a rank paid. seconds: of the processor. rounds: messages that had to be sent one after
    the other before this rank was done. num_bytes: sent and received."""

    seconds: float = 0.0
    rounds: int = 0
    num_bytes: int = 0


@dataclass
class _World:
    num_ranks: int
    group: dist.ProcessGroup
    costs: list[RankCost]
    here: threading.local = field(default_factory=threading.local)
    boxes: dict[tuple[int, int], deque[tuple[int, torch.Tensor]]] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)
    turns: list[threading.Lock] = field(default_factory=list)
    ready: deque[int] = field(default_factory=deque)

    @property
    def rank(self) -> int:
        rank: int = self.here.rank
        return rank

    def pass_turn(self) -> None:
        """Let the next rank run that has what it waited for."""
        if self.ready:
            self.turns[self.ready.popleft()].release()
        elif self.waiting:  # for each other: let all fail
            for rank in self.waiting:
                self.turns[rank].release()

    def send(self, tensor: torch.Tensor, dst: int, group: Any = None) -> None:
        cost = self.costs[self.rank]
        cost.rounds += 1
        cost.num_bytes += tensor.numel() * tensor.itemsize
        self.boxes.setdefault((self.rank, dst), deque()).append((cost.rounds, tensor.clone()))
        if self.waiting.get(dst) == self.rank:
            del self.waiting[dst]
            self.ready.append(dst)

    def recv(self, tensor: torch.Tensor, src: int, group: Any = None) -> None:
        box = self.boxes.setdefault((src, self.rank), deque())
        if not box:
            self.waiting[self.rank] = src
            self.pass_turn()
            self.turns[self.rank].acquire()
        rounds, sent = box.popleft()  # empty if all ranks wait
        cost = self.costs[self.rank]
        cost.rounds = max(cost.rounds, rounds)
        cost.num_bytes += sent.numel() * sent.itemsize
        tensor.copy_(sent)

    def broadcast(self, tensor: torch.Tensor, src: int = 0, group: Any = None) -> None:
        """Along a binomial tree, as gloo's."""
        own, size = (self.rank - src) % self.num_ranks, self.num_ranks
        distance = 1
        while distance < size and not own % (2 * distance):
            distance *= 2
        if own:
            self.recv(tensor, (own - distance + src) % size)
        while distance := distance // 2:
            if own + distance < size:
                self.send(tensor, (own + distance + src) % size)

    def broadcast_object_list(self, box: list[Any], src: int = 0, group: Any = None) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(box)), dtype=torch.uint8)
        num_bytes = torch.tensor([data.numel()])
        self.broadcast(num_bytes, src)
        if self.rank != src:
            data = torch.empty(int(num_bytes), dtype=torch.uint8)
        self.broadcast(data, src)
        if self.rank != src:
            box[:] = pickle.loads(data.numpy().tobytes())


@contextmanager
def _patched(world: _World) -> Iterator[None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a collective whose messages grow with the ranks")

    with mock.patch.multiple(
        dist,
        is_initialized=lambda: True,
        get_backend=lambda group=None: "gloo",
        get_world_size=lambda group=None: world.num_ranks,
        get_rank=lambda group=None: world.rank,
        new_group=lambda **_: world.group,
        send=world.send,
        recv=world.recv,
        broadcast=world.broadcast,
        broadcast_object_list=world.broadcast_object_list,
        all_gather=refuse,
        all_gather_object=refuse,
        all_reduce=refuse,
    ):
        yield


def run_all(num_ranks: int, work: Callable[[int], None]) -> list[RankCost]:
    """Call `work` with each rank, all at a time; return what each paid. Raises the first error."""
    costs = [RankCost() for _ in range(num_ranks)]
    world = _World(num_ranks, dist.ProcessGroup(0, num_ranks), costs)
    for rank in range(num_ranks):
        world.turns.append(threading.Lock())
        world.turns[rank].acquire()
        world.ready.append(rank)
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        world.here.rank = rank
        world.turns[rank].acquire()
        begun = time.thread_time()
        try:
            work(rank)
        except BaseException as error:
            errors.append(error)
        costs[rank].seconds = time.thread_time() - begun
        world.pass_turn()

    before = threading.stack_size(_STACK_BYTES)
    gc.disable()  # else one rank pays for what others have left
    try:
        with _patched(world):
            threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
            for thread in threads:
                thread.start()
            world.pass_turn()
            for thread in threads:
                thread.join()
    finally:
        gc.enable()
        threading.stack_size(before)
    if errors:
        raise errors[0]
    return costs
