"""Private parts of torch.distributed.elastic that bigtrain's rendezvous and agent rely on."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api as multiprocessing
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousSettings,
    RendezvousTimeout,
)
from torch.distributed.launcher import api as launcher

from bigtrain.errors import EXIT_STOPPED
from bigtrain.launchers import elastic_patches
from bigtrain.launchers.elastic_patches import Agent, Rendezvous
from bigtrain.launchers.membership import SilenceDetector
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
    takes(elastic_patches.TooManyHostsError, lambda: dynamic._should_keep_alive, "ctx"),
    # An agent that leaves closes nothing for others, because `Rendezvous.shutdown` is called.
    reads(
        elastic_patches.FaultyHostError,
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
    reads(
        Agent,
        lambda: multiprocessing.SubprocessContext._start,
        "self.subprocess_handlers =",
    ),
    reads(elastic_patches.install, lambda: launcher.launch_agent, "agent = LocalElasticAgent("),
    reads(elastic_patches.install, lambda: launcher.launch_agent, "spec=spec"),
    Contract(
        elastic_patches.grace_after,
        "a WorkerSpec has no rdzv_handler",
        lambda: "rdzv_handler" in WorkerSpec.__dataclass_fields__,
    ),
]


@pytest.mark.parametrize("contract", CONTRACTS, ids=title)
def test_contract(contract: Contract) -> None:
    contract.check("torch")


def test_each_public_part_has_a_contract() -> None:
    wanted = public_functions(elastic_patches)
    assert wanted - {contract.name for contract in CONTRACTS} == set()


class Backend:
    """A store of one value that two agents share."""

    name = "test"

    def __init__(self) -> None:
        self.value: tuple[bytes, int] | None = None

    def get_state(self) -> Any:
        return self.value

    def set_state(self, state: bytes, token: Any = None) -> Any:
        now = self.value[1] if self.value else None
        if token != now:
            return (*self.value, False) if self.value else None
        self.value = (state, (now or 0) + 1)
        return (*self.value, True)


def test_what_is_added_to_the_state_reaches_other_agents() -> None:
    nodes = [dynamic._NodeDesc(name, 1, 0) for name in "ab"]
    backend = Backend()
    first, second = (elastic_patches._StateHolder(node, backend, settings(), 0.0) for node in nodes)
    first.sync()
    elastic_patches._State(first.state).expected = {nodes[0]: 0, nodes[1]: 1}
    elastic_patches._State(first.state).failed = (3, 1)
    first.mark_dirty()
    assert first.sync() is True
    second.sync()
    assert elastic_patches._State(second.state).expected == {nodes[0]: 0, nodes[1]: 1}
    assert elastic_patches._State(second.state).failed == (3, 1)


def test_a_host_that_is_lost_between_two_rounds_is_not_waited_for() -> None:
    nodes = [dynamic._NodeDesc(name, 1, 0) for name in "ab"]
    now = [0.0]
    holder = elastic_patches._StateHolder(nodes[0], Backend(), settings(), 0.0)
    holder._silence = SilenceDetector(4, 100, lambda: now[0])
    state = holder.state
    elastic_patches._State(state).expected = {nodes[0]: 0, nodes[1]: 1}
    for now[0] in (0.0, 3.0):  # also one that has just left the round to join the next
        holder._sanitize()
        assert nodes[1] in elastic_patches._State(state).expected
    now[0] = 4.0
    holder._sanitize()
    assert elastic_patches._State(state).expected == {nodes[0]: 0}


@pytest.mark.parametrize(
    ("code", "seconds"), [(EXIT_STOPPED, 30), (-9, 0), (1, 1), (2, 1), (76, 1)]
)
def test_others_get_time_where_they_can_save(code: int, seconds: int) -> None:
    assert elastic_patches.grace_after(code) == seconds
