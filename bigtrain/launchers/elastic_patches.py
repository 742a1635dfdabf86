"""Rendezvous of torchrun (torch 2.11 to 2.13) whose agents restart a run seconds after a loss.

The script of `bigtrain launch torchrun` chooses them by ``--rdzv-backend=bigtrain``. The state of
the rendezvous, its store and its rounds are those of torch's c10d backend
(torch/distributed/elastic/rendezvous/dynamic_rendezvous.py). What differs:

- Agents notice a host by its missing heartbeats, and restart at once. Torch removes it from the
  state, but looks only at hosts that wait: it restarts when a rank's collective fails.
- Heartbeats have separate keys (`bigtrain.launchers.heartbeats`). Torch writes heartbeats into the
  state, agent after agent, and every agent reads the state all the time.
- A failed rank is in the state, so that all agents end their ranks
  (`bigtrain.launchers.agent_patches`).
- A round is complete as soon as all hosts of the last round that are alive have joined, and all
  hosts that wait. Torch waits for the last call timeout unless the maximum of hosts is there.
- Spares stay idle while all hosts of the round are alive, also during a restart; each host keeps
  its rank, and a spare gets the rank of the host it replaces.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousSettings,
    RendezvousTimeout,
    _Action,
    _BackendRendezvousStateHolder,
    _DistributedRendezvousOpExecutor,
    _NodeDesc,
    _remove_participant_epilogue,
    _RendezvousContext,
    _RendezvousJoinOp,
    _RendezvousState,
)

from bigtrain.launchers.heartbeats import Heartbeats, look_seconds
from bigtrain.launchers.membership import assign_ranks
from bigtrain.launchers.rendezvous_server import COMPLETE, ENDING, RESULT, TOO_FEW_NODES

BACKEND = "bigtrain"
"""Value of torchrun's ``--rdzv-backend``."""

GRACE_SECONDS = 30
"""Time for ranks to save and end after SIGTERM, as in torch; then they are killed."""

_WITHOUT_PLACE_SECONDS = 10.0
"""How long a host without a place waits for one, after a lost host would have been noticed."""


class TooManyHostsError(RendezvousError):
    """The run has all hosts and spares that it may have."""


class FaultyNodeError(RendezvousError):
    """A rank found that this host computes wrong bits: its agent leaves the run."""


class _State:
    """Attributes that this rendezvous adds to torch's state, and that are pickled with it."""

    def __init__(self, state: _RendezvousState) -> None:
        self._attributes: dict[str, Any] = vars(state)

    @property
    def expected(self) -> dict[_NodeDesc, int]:
        """Hosts of the last complete round that are not lost, with their ranks."""
        ranks: dict[_NodeDesc, int] = self._attributes.setdefault("expected", {})
        return ranks

    @expected.setter
    def expected(self, ranks: dict[_NodeDesc, int]) -> None:
        self._attributes["expected"] = ranks

    @property
    def failed(self) -> tuple[int, int] | None:
        """Newest round in which a rank failed, and the seconds that other ranks get to end; None
        if no rank has failed."""
        failure: tuple[int, int] | None = self._attributes.get("failed")
        return failure

    @failed.setter
    def failed(self, failure: tuple[int, int]) -> None:
        self._attributes["failed"] = failure


class _StateHolder(_BackendRendezvousStateHolder):
    """State of the rendezvous without the hosts that this host finds silent (`lost`)."""

    def __init__(
        self,
        node: _NodeDesc,
        backend: Any,
        settings: RendezvousSettings,
        heartbeats: Heartbeats[_NodeDesc],
    ) -> None:
        super().__init__(backend, settings, cache_duration=0)
        self._node, self._heartbeats = node, heartbeats

    @property
    def lost(self) -> list[_NodeDesc]:
        """Hosts of the state in the store that this host finds silent."""
        return self._dead_nodes

    def sync(self) -> bool | None:
        """Read or write the state, as torch's own, but read it only when it has changed."""
        if not self._dirty and not self._heartbeats.look():
            return None
        has_set: bool | None = super().sync()
        if has_set:
            self._heartbeats.announce_change()
        return has_set

    def _sanitize(self) -> None:
        """Remove silent hosts: locally, until this host writes the state."""
        state = self._state
        # Between two rounds a host has no heartbeat in the state for a moment; it may be lost then.
        hosts = {*_State(state).expected, *state.last_heartbeats}
        self._dead_nodes = [node for node in self._heartbeats.silent if node in hosts]
        was_participant = False
        for node in self._dead_nodes:
            state.last_heartbeats.pop(node, None)
            was_participant |= state.participants.pop(node, None) is not None
            state.wait_list.discard(node)
            state.redundancy_list.discard(node)
            _State(state).expected.pop(node, None)
        if was_participant:
            _remove_participant_epilogue(state, self._settings)
        self._heartbeats.watch(hosts)


class _Executor(_DistributedRendezvousOpExecutor):
    """Operations on the state. Ranks of hosts are kept from round to round."""

    def _mark_rendezvous_complete(self) -> None:
        """Complete the round as torch does, but with `assign_ranks`."""
        super()._mark_rendezvous_complete()
        state = self._state
        ranks = assign_ranks(state.participants, _State(state).expected)
        state.participants.update(ranks)
        _State(state).expected = ranks


class _Join(_RendezvousJoinOp):
    """Next action of a host that joins a round. spares: hosts that may idle beyond the maximum;
    has_lost: whether this host has found a host silent, which it has to write into the state."""

    def __init__(self, spares: int, has_lost: Callable[[], bool]) -> None:
        self._spares, self._has_lost = spares, has_lost
        self._without_place_since: float | None = None

    def __call__(self, ctx: _RendezvousContext, deadline: float) -> _Action:
        """Return the action. Heartbeats need no action here, so KEEP_ALIVE, which writes the state,
        is only used to write the loss of a host."""
        action = self._next_action(ctx, deadline)
        if action in (_Action.KEEP_ALIVE, _Action.SYNC):
            return _Action.KEEP_ALIVE if self._has_lost() else _Action.SYNC
        return action

    def _next_action(self, ctx: _RendezvousContext, deadline: float) -> _Action:
        state, node = ctx.state, ctx.node
        if state.closed:
            return super().__call__(ctx, deadline)
        expected, joined = _State(state).expected, state.participants
        if node not in joined and node not in state.wait_list:
            # A place belongs to a host while it is alive, also during a restart.
            num_occupied = len({*joined, *state.wait_list, *expected} - {node})
            if num_occupied >= ctx.settings.max_nodes:
                return self._idle(ctx)
        # The round is complete with every host of the last round that is alive, unless a host that
        # waits or idles could still join.
        has_all_expected = bool(expected) and expected.keys() <= joined.keys()
        is_large_enough = len(joined) >= ctx.settings.min_nodes
        has_place = len(joined) < ctx.settings.max_nodes
        may_join = bool(state.wait_list or (state.redundancy_list and has_place))
        is_round_full = has_all_expected and is_large_enough and not may_join
        if node in joined and not state.complete and is_round_full:
            return _Action.MARK_RENDEZVOUS_COMPLETE
        return super().__call__(ctx, deadline)

    def _idle(self, ctx: _RendezvousContext) -> _Action:
        """Return the action of a host without a place: it becomes a spare, or waits until a host
        could have been noticed as lost. Raises TooManyHostsError."""
        state = ctx.state
        if ctx.node in state.redundancy_list:
            return _Action.SYNC
        if len(state.redundancy_list) < self._spares:
            say(f"all {ctx.settings.max_nodes} nodes of the run are there: this one is a spare")
            return _Action.ADD_TO_REDUNDANCY_LIST
        now = time.monotonic()
        if self._without_place_since is None:
            self._without_place_since = now
        settings = ctx.settings
        interval_seconds = settings.keep_alive_interval.total_seconds()
        lost_seconds = interval_seconds * settings.keep_alive_max_attempt
        if now - self._without_place_since > lost_seconds + _WITHOUT_PLACE_SECONDS:
            raise TooManyHostsError(
                f"the run has all of its {settings.max_nodes} nodes and {self._spares} spares"
            )
        return _Action.SYNC


class Rendezvous(DynamicRendezvousHandler):
    """Rendezvous of one agent. Its `num_nodes_waiting`, for which the agent restarts its ranks,
    counts lost and failed hosts too."""

    _state_holder: _StateHolder

    def __init__(self, params: RendezvousParameters) -> None:
        def seconds(name: str) -> timedelta | None:
            value = params.get_as_int(name)
            return None if value is None else timedelta(seconds=value)

        backend, store = create_backend(params)
        settings = RendezvousSettings(
            params.run_id,
            params.min_nodes,
            params.max_nodes,
            RendezvousTimeout(join=seconds("join_timeout"), last_call=seconds("last_call_timeout")),
            keep_alive_interval=seconds("keep_alive_interval") or timedelta(seconds=1),
            keep_alive_max_attempt=params.get_as_int("keep_alive_max_attempt") or 4,
        )
        self._spares = params.get_as_int("spares") or 0
        # Heartbeats of its own, and torch's handler with this module's state and operations.
        node = self._node_desc_generator.generate(params.local_addr)
        self._poll_seconds = look_seconds(params.max_nodes + self._spares)
        self._heartbeats = Heartbeats(
            backend._call_store,
            f"bigtrain.rendezvous.{params.run_id}",
            node,
            timeout=settings.keep_alive_interval.total_seconds() * settings.keep_alive_max_attempt,
            look_seconds=self._poll_seconds,
        )
        holder = _StateHolder(node, backend, settings, self._heartbeats)
        super().__init__(node, settings, BACKEND, store, holder)
        self._op_executor = _Executor(node, holder, settings)
        self._participants: dict[_NodeDesc, int] = {}
        self._round = 0
        super()._start_heartbeats()  # from before this host joins until it leaves

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round, as in torch; a spare waits there until it gets a place. Raises
        RendezvousError; RendezvousGracefulExitError, which is a success, if the run is complete."""
        try:
            with _replaced_operations(
                self._poll_seconds,
                lambda: _Join(self._spares, lambda: bool(self._state_holder.lost)),
            ):
                info = super().next_rendezvous()
        except RendezvousClosedError:
            if self._store.check([RESULT]) and self._store.get(RESULT) == COMPLETE.encode():
                raise RendezvousGracefulExitError from None
            raise
        except RendezvousTimeoutError:
            self.report_result(TOO_FEW_NODES)
            raise
        state = self._state_holder.state
        self._participants, self._round = dict(state.participants), state.round
        return info

    def _start_heartbeats(self) -> None:
        """Do nothing: torch starts heartbeats once this host has joined."""

    def _stop_heartbeats(self) -> None:
        """Do nothing: torch stops heartbeats while this host joins."""

    def _keep_alive(self) -> None:
        """Send a heartbeat, which torch's timer calls."""
        with suppress(RendezvousConnectionError):  # the main thread gets it too
            self._heartbeats.beat()

    def num_nodes_waiting(self) -> int:
        """Return how many hosts wait to join, have failed, or are lost since the round began."""
        waiting = super().num_nodes_waiting()
        with self._heartbeat_lock:
            while self._state_holder.lost:  # until this host or another has written the loss
                self._state_holder.mark_dirty()
                self._state_holder.sync()
        return waiting + len(self._departed()) + int(self._failure_grace() is not None)

    def grace_seconds(self) -> int:
        """Return the seconds that ranks get to save and end, by the state at the last
        `num_nodes_waiting`: none if ranks of a lost host cannot save with them."""
        if self.lost_hosts():
            return 0
        failure_grace = self._failure_grace()
        return GRACE_SECONDS if failure_grace is None else failure_grace

    def report_failure(self, grace_seconds: int) -> None:
        """Report to all agents that a rank of this round has failed."""

        def report(state: _RendezvousState) -> None:
            _State(state).failed = (self._round, grace_seconds)

        self._write(report)

    def is_ending(self) -> bool:
        """Return whether the run shall end when its ranks have stopped."""
        return bool(self._store.check([ENDING]))

    def report_result(self, result: str) -> None:
        """Report how the run ended, to the server of the rendezvous and agents that come later."""
        self._store.set(RESULT, result)

    def leave(self) -> None:
        """Leave the run, which continues: no host waits for this host or ends with it."""
        super()._stop_heartbeats()
        self._participants = {}

        def remove(state: _RendezvousState) -> None:
            state.participants.pop(self._this_node, None)
            state.last_heartbeats.pop(self._this_node, None)
            _State(state).expected.pop(self._this_node, None)
            _remove_participant_epilogue(state, self._settings)

        self._write(remove)

    def _write(self, change: Callable[[_RendezvousState], None]) -> None:
        """Change the state that all agents have."""
        with self._heartbeat_lock:
            while True:
                self._state_holder.sync()
                change(self._state_holder.state)
                self._state_holder.mark_dirty()
                if self._state_holder.sync():
                    return

    def shutdown(self) -> bool:
        """Close the rendezvous for all hosts, as torch does, unless this host never had a place."""
        super()._stop_heartbeats()
        return super().shutdown() if self._participants else True

    def lost_hosts(self) -> list[str]:
        """Return the names of the round's hosts that are lost: they neither train nor wait."""
        state = self._state_holder.state
        waiting = _State(state).expected
        return sorted(node.addr for node in self._departed() if node not in waiting)

    def _departed(self) -> list[_NodeDesc]:
        """Return the hosts that have left this agent's round."""
        state = self._state_holder.state
        if state.round != self._round:
            return list(self._participants)
        return [node for node in self._participants if node not in state.participants]

    def _failure_grace(self) -> int | None:
        """Return the seconds that ranks get to end after a failure in this round; None without a
        failure."""
        failed = _State(self._state_holder.state).failed
        if failed is None:
            return None
        failed_round, grace_seconds = failed
        return grace_seconds if failed_round == self._round else None


@contextmanager
def _replaced_operations(
    poll_seconds: float, join: Callable[[], _RendezvousJoinOp]
) -> Iterator[None]:
    """Make `next_rendezvous` join by `join`, and look at the state every `poll_seconds` instead of
    every second, inside the context."""
    replacements = {"_delay": lambda seconds: time.sleep(poll_seconds), "_RendezvousJoinOp": join}
    originals = {name: getattr(dynamic_rendezvous, name) for name in replacements}
    vars(dynamic_rendezvous).update(replacements)
    try:
        yield
    finally:
        vars(dynamic_rendezvous).update(originals)


def say(text: str) -> None:
    """Show a line of this host's agent."""
    print(f"torchrun: {socket.gethostname()}: {text}", file=sys.stderr, flush=True)
