"""The stores at which sites meet: each site's main rank serves one, its door.

What lies there is JSON: nothing of it is unpickled. A call to a door on another host ends in time,
though the link to it is cut, over which torch's own calls would wait for TCP to give up.
"""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from bigtrain.system.listening import listen_only_at

ANSWER_SECONDS = 5.0
"""For an answer of a store, which is a thread that does nothing else: then its host is lost."""
_CONNECT_SECONDS = 2.0

Place = tuple[str, int]
"""Host and port of a door."""
Result = TypeVar("Result")


def place_of(tree: Any) -> Place:
    """A place that came as JSON. Raises TypeError, ValueError for what is none."""
    host, port = tree
    return str(host), int(port)


class Door:
    """A store of text by name. Every method raises `torch.distributed.DistError` if the store is
    gone or does not answer within `ANSWER_SECONDS`, from then on at once.

    place: where others reach it.
    """

    def __init__(self, place: Place, open_store: Callable[[], Any], *, is_own: bool) -> None:
        self.place = place
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] | None = None
        self._is_lost = False
        if not is_own:
            self._calls = queue.SimpleQueue()
            # A daemon: a call that never ends must not keep the process from ending.
            threading.Thread(target=self._work, name="door", daemon=True).start()
        self.store = self._within(open_store)

    @classmethod
    def served(cls, host: str, port: int) -> Door:
        """The own door, at `port` of `host` (0: any). Raises DistError if it cannot be used."""
        bound = listen_only_at(host, port)
        if bound is None and port == 0:
            bound = listen_only_at("0.0.0.0", 0)
        port = port if bound is None else bound.getsockname()[1]

        def open_store() -> Any:
            return dist.TCPStore(
                host,
                port,
                is_master=True,
                timeout=timedelta(seconds=ANSWER_SECONDS),
                wait_for_workers=False,
                master_listen_fd=None if bound is None else bound.detach(),
            )

        return cls((host, port), open_store, is_own=True)

    @classmethod
    def reached(cls, place: Place) -> Door:
        """A door of another site."""
        try:
            # Torch's store would try again for long where nobody listens any more.
            socket.create_connection(place, timeout=_CONNECT_SECONDS).close()
        except OSError as error:
            raise dist.DistNetworkError(f"{place[0]}:{place[1]}: {error}") from error

        def open_store() -> Any:
            return dist.TCPStore(
                *place,
                is_master=False,
                timeout=timedelta(seconds=ANSWER_SECONDS),
                wait_for_workers=False,
            )

        return cls(place, open_store, is_own=False)

    def set(self, key: str, tree: Any) -> None:
        """Put a JSON value there."""
        text = json.dumps(tree)
        self._within(lambda: self.store.set(key, text))

    def has(self, keys: Sequence[str]) -> bool:
        """Whether all of them are there."""
        return not keys or bool(self._within(lambda: self.store.check(list(keys))))

    def get(self, key: str) -> Any:
        """What `set` has put there; None if nothing is. Raises ValueError for what is no JSON."""
        if not self.has([key]):
            return None
        try:
            return json.loads(self._within(lambda: self.store.get(key)))
        except dist.DistStoreError:  # deleted since
            return None

    def delete(self, key: str) -> None:
        """Forget it, if it is there."""
        self._within(lambda: self.store.delete_key(key))

    def close(self) -> None:
        """End the connection."""
        if self._calls is not None:
            self._calls.put(None)

    def _within(self, call: Callable[[], Result]) -> Result:
        if self._calls is None:
            return call()
        if self._is_lost:
            raise dist.DistNetworkError(f"{self.place[0]}:{self.place[1]} is lost")
        future: Future[Result] = Future()
        self._calls.put((future, call))
        for _ in range(2):  # a process that was stopped itself finds the answer the second time
            try:
                return future.result(ANSWER_SECONDS / 2)
            except TimeoutError:
                continue
        self._is_lost = True
        raise dist.DistNetworkError(
            f"no answer from {self.place[0]}:{self.place[1]} within {ANSWER_SECONDS:g} s"
        )

    def _work(self) -> None:
        assert self._calls is not None
        while (item := self._calls.get()) is not None:
            future, call = item
            try:
                future.set_result(call())
            except BaseException as error:  # for whoever called
                future.set_exception(error)


def listens(place: Place) -> bool:
    """Whether anybody may listen there: False only where the host says that nobody does."""
    try:
        socket.create_connection(place, timeout=_CONNECT_SECONDS / 2).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return True
    return True
