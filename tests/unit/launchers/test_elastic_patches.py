"""Private parts of torch.distributed.elastic that bigtrain's rendezvous and agent rely on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api as multiprocessing
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousSettings,
    RendezvousTimeout,
)
from torch.distributed.launcher import api as launcher

from bigtrain.errors import EXIT_STOPPED
from bigtrain.launchers import agent_patches, elastic_patches
from bigtrain.launchers.agent_patches import Agent
from bigtrain.launchers.elastic_patches import Rendezvous
from bigtrain.launchers.heartbeats import NUM_WATCHED, Heartbeats
from tests.support.contracts import Contract, has, is_as_read, public_functions, reads, takes, title

STATE = ("participants", "wait_list", "redundancy_list", "last_heartbeats", "round", "closed")


def settings() -> RendezvousSettings:
    return RendezvousSettings(
        "id", 1, 2, RendezvousTimeout(), timedelta(seconds=1), keep_alive_max_attempt=4
    )


CONTRACTS = [
    Contract(
        Rendezvous,
        f"_RendezvousState has not all of {STATE}",
        lambda: all(hasattr(dynamic._RendezvousState(), name) for name in (*STATE, "complete")),
    ),
    # `_StateHolder` replaces it, `_Join` and `_Executor` precede these.
    is_as_read(Rendezvous, lambda: dynamic._BackendRendezvousStateHolder._sanitize, "274e9b093a21"),
    is_as_read(Rendezvous, lambda: dynamic._RendezvousJoinOp.__call__, "8ce27da4a062"),
    # Torch's heartbeats only call `Rendezvous._keep_alive`, from its start to its end.
    reads(
        Rendezvous,
        lambda: DynamicRendezvousHandler._start_heartbeats,
        "self._keep_alive_weak, weakref.ref(self)",
        "self._keep_alive_timer.start()",
    ),
    reads(Rendezvous, lambda: DynamicRendezvousHandler._keep_alive_weak, "self._keep_alive()"),
    reads(
        Rendezvous,
        lambda: C10dRendezvousBackend._call_store,
        "getattr(self._store, store_op)(*args, **kwargs)",
        "raise RendezvousConnectionError(",
    ),
    reads(
        Rendezvous,
        lambda: dynamic._BackendRendezvousStateHolder.sync,
        "pickle.dumps(self._state)",
        "self._sanitize()",
        "return has_set",
    ),
    reads(
        Rendezvous,
        lambda: dynamic._DistributedRendezvousOpExecutor.run,
        "self._state = self._state_holder.state",
        "_delay(seconds=1)",
        "self._mark_rendezvous_complete()",
    ),
    reads(
        Rendezvous,
        lambda: DynamicRendezvousHandler.next_rendezvous,
        "join_op = _RendezvousJoinOp()",
        "self._op_executor.run(join_op",
    ),
    reads(
        Rendezvous,
        lambda: DynamicRendezvousHandler.num_nodes_waiting,
        "with self._heartbeat_lock:",
        "return len(self._state_holder.state.wait_list)",
    ),
    has(Rendezvous, lambda: DynamicRendezvousHandler, "_stop_heartbeats"),
    takes(Rendezvous, lambda: dynamic._remove_participant_epilogue, "state", "settings"),
    reads(
        elastic_patches.TooManyHostsError,
        lambda: DynamicRendezvousHandler.next_rendezvous,
        "self._record(",
        "raise",
    ),
    # An agent that leaves closes nothing for others, because `Rendezvous.shutdown` is called.
    reads(
        elastic_patches.FaultyNodeError,
        lambda: launcher.launch_agent,
        "spec.rdzv_handler.shutdown()",
    ),
    # A host that waits restarts the ranks of all agents; so do lost and failed ones.
    reads(
        Agent,
        lambda: SimpleElasticAgent._invoke_run,
        "num_nodes_waiting = rdzv_handler.num_nodes_waiting()",
        "if num_nodes_waiting > 0:",
        "self._restart_workers(self._worker_group)",
        "if self._remaining_restarts > 0:",
    ),
    reads(
        Agent,
        lambda: SimpleElasticAgent._restart_workers,
        "self._stop_workers(worker_group)",
        "worker_group.state = WorkerState.STOPPED",
    ),
    reads(Agent, lambda: SimpleElasticAgent.run, "except RendezvousGracefulExitError"),
    reads(Agent, lambda: LocalElasticAgent._monitor_workers, "self._pcontext"),
    reads(Agent, lambda: LocalElasticAgent._shutdown, "self._pcontext.close("),
    has(Agent, lambda: multiprocessing.MultiprocessContext, "close"),
    reads(Agent, lambda: multiprocessing.MultiprocessContext._start, "self._pc ="),
    reads(Agent, lambda: multiprocessing.SubprocessContext._start, "self.subprocess_handlers ="),
    reads(agent_patches.install, lambda: launcher.launch_agent, "agent = LocalElasticAgent("),
    reads(agent_patches.install, lambda: launcher.launch_agent, "spec=spec"),
    Contract(
        agent_patches.grace_after,
        "a WorkerSpec has no rdzv_handler",
        lambda: "rdzv_handler" in WorkerSpec.__dataclass_fields__,
    ),
]


@pytest.mark.parametrize("contract", CONTRACTS, ids=title)
def test_contract(contract: Contract) -> None:
    contract.check("torch")


def test_each_public_part_has_a_contract() -> None:
    wanted = public_functions(elastic_patches) | public_functions(agent_patches)
    wanted -= {"say"}  # prints a line, and uses nothing of torch
    assert wanted - {contract.name for contract in CONTRACTS} == set()


@dataclass
class Agents:
    """Simulated agents of one run at a real store, and what they have asked of it. Time is that of
    the test."""

    store: TCPStore
    num_agents: int
    now: float = 0.0
    calls: Counter[str] = field(default_factory=Counter)
    keys_read: int = 0
    largest_read: int = 0

    def __post_init__(self) -> None:
        self.nodes = [dynamic._NodeDesc(f"n{i}", 1, 0) for i in range(self.num_agents)]
        self.holders = {node: self.holder(node) for node in self.nodes}
        self.all_join()

    def call(self, operation: str, *arguments: Any) -> Any:
        """Ask the store, and count it."""
        self.calls[operation] += 1
        if operation == "multi_get":
            self.keys_read += len(arguments[0])
            self.largest_read = max(self.largest_read, len(arguments[0]))
        return getattr(self.store, operation)(*arguments)

    def holder(self, node: Any) -> elastic_patches._StateHolder:
        backend = C10dRendezvousBackend(self.store, "id")
        backend._call_store = self.call
        self.heartbeats = getattr(self, "heartbeats", {})
        beats = Heartbeats(
            self.call, "beats", node, timeout=4.0, look_seconds=0.2, clock=lambda: self.now
        )
        self.heartbeats[node] = beats
        return elastic_patches._StateHolder(node, backend, settings(), beats)

    def all_join(self) -> None:
        """Complete a round with all agents, by a single write."""
        first = self.holders[self.nodes[0]]
        first.sync()
        state = first.state
        state.participants = {node: rank for rank, node in enumerate(self.nodes)}
        state.last_heartbeats = dict.fromkeys(self.nodes, datetime.now(UTC))
        state.complete = True
        elastic_patches._State(state).expected = dict(state.participants)
        first.mark_dirty()
        assert first.sync() is True

    def pass_seconds(self, seconds: float, dead: Collection[Any] = ()) -> None:
        """Let all but the `dead` look at the rendezvous, write what they found, and send a
        heartbeat, once a second."""
        for _ in range(round(seconds)):
            self.now += 1.0
            for node in self.nodes:
                if node not in dead:
                    self.heartbeats[node].beat()
            for node in self.nodes:
                if node not in dead:
                    self.holders[node].sync()
                    while self.holders[node].lost:
                        self.holders[node].mark_dirty()
                        self.holders[node].sync()


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_what_is_added_to_the_state_reaches_other_agents(store: TCPStore) -> None:
    agents = Agents(store, 2)
    first, second = (agents.holders[node] for node in agents.nodes)
    elastic_patches._State(first.state).failed = (3, 1)
    first.mark_dirty()
    assert first.sync() is True
    second.sync()
    state = elastic_patches._State(second.state)
    assert state.expected == {agents.nodes[0]: 0, agents.nodes[1]: 1}
    assert state.failed == (3, 1)


def test_a_host_that_is_lost_between_two_rounds_is_not_waited_for(store: TCPStore) -> None:
    agents = Agents(store, 2)
    first, second = agents.nodes
    state = agents.holders[first].state
    state.participants, state.last_heartbeats = {first: 0}, {}  # it has just left the round
    agents.holders[first].mark_dirty()
    agents.holders[first].sync()
    agents.pass_seconds(4, [second])
    assert second in elastic_patches._State(agents.holders[first].state).expected
    agents.pass_seconds(1, [second])
    assert elastic_patches._State(agents.holders[first].state).expected == {first: 0}


@pytest.mark.parametrize("num_agents", [32, 128])
def test_work_of_an_agent_does_not_grow_with_their_number(store: TCPStore, num_agents: int) -> None:
    """And hosts that are lost at once are out of everyone's state 5 s later."""
    agents = Agents(store, num_agents)
    agents.pass_seconds(1)  # all have read the state
    agents.calls.clear()
    agents.keys_read = 0
    agents.pass_seconds(3)
    assert agents.calls == {"set": 3 * num_agents, "multi_get": 3 * num_agents}
    assert agents.keys_read == 3 * num_agents * (1 + NUM_WATCHED)

    dead = set(agents.nodes[: num_agents // 8])  # those of some racks, say
    agents.calls.clear()
    agents.pass_seconds(5, dead)
    rest = set(agents.nodes) - dead
    for node in rest:
        state = agents.holders[node].state
        assert set(state.participants) == rest
        assert set(elastic_patches._State(state).expected) == rest
    # Each lost host is written by one of those that watch it; what another has written is not.
    assert agents.calls["compare_set"] <= NUM_WATCHED * len(dead)
    assert agents.calls["multi_get"] == 5 * len(rest)
    assert agents.largest_read == 1 + NUM_WATCHED


@pytest.mark.parametrize(
    ("code", "seconds"), [(EXIT_STOPPED, 30), (-9, 0), (1, 1), (2, 1), (76, 1)]
)
def test_others_get_time_where_they_can_save(code: int, seconds: int) -> None:
    assert agent_patches.grace_after(code) == seconds
