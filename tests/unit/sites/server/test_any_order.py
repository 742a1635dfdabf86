"""Any order of what sites and a server do, in both ways to exchange: each round was made by its
rule, or it was not made."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bigtrain.sites.outer_optimizer import outer_update
from bigtrain.sites.protocol import RefusedError, RoundPlan
from bigtrain.sites.server.members import Rules
from bigtrain.sites.server.state import OuterServerState
from bigtrain.sites.server.store import ServerDirectory
from tests.support.tiers import examples
from tests.unit.sites.server.direct_run import WINDOW, DirectRun, Site
from tests.unit.sites.server.test_deliveries import SHAPES, Weights, changed, section, start
from tests.unit.sites.server.test_deliveries import Site as ServerSite

SITES = st.integers(0, 2)
ORDERS = settings(
    max_examples=examples(60),
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def new_folder() -> Path:
    """In memory where there is such a folder: a sync costs nothing there."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))


def asked(work: Callable[[], Any]) -> Any:
    """As a site does, which is refused, or told to try again later."""
    for _ in range(9):
        with suppress(OSError):
            try:
                return work()
            except RefusedError:
                return None
    raise AssertionError


def fill_disk(store: ServerDirectory, number: int) -> None:
    """Let the next so many commits of a store fail."""
    left = [number]

    def failing() -> None:
        if left[0]:
            left[0] -= 1
            raise OSError(28, "No space left on device")
        ServerDirectory._commit(store)

    store._commit = failing  # type: ignore[method-assign]


class DirectOrders(RuleBasedStateMachine):
    """Three sites that begin, enter, vote, are lost, leave, and ask twice."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = new_folder()
        self.server = DirectRun(self.folder)
        self.sites = [Site(self.server, index) for index in range(3)]
        self.alive: set[int] = set()
        self.entered: dict[int, dict[str, Any]] = {}
        self.plans: dict[str, tuple[RoundPlan, dict[int, dict[str, Any]]]] = {}
        self.votes: dict[str, dict[int, bool]] = {}
        self.verdicts: dict[str, bool] = {}
        for index in range(3):
            self.join(index, True)
        self.make_round([1, 1, 1])

    def teardown(self) -> None:
        self.server.state.store.close()
        shutil.rmtree(self.folder)

    @rule(index=SITES, is_new=st.booleans())
    def join(self, index: int, is_new: bool) -> None:
        site = self.sites[index]
        if is_new:  # without a checkpoint
            site.number, site.tokens_seen, site.step, site.digest = 0, 0, 0, "0" * 16
        asked(site.join)
        self.alive.add(index)
        self.enter(index, None, 0)

    @rule(index=SITES, fragment=st.sampled_from([0, 0, None]), tokens=st.integers(1, 9))
    def enter(self, index: int, fragment: int | None, tokens: int) -> None:
        if index in self.alive:
            site = self.sites[index]
            site.entry = secrets.token_hex(8)
            self.entered[index] = site.sent = site.entered(fragment, tokens)
            self.enter_again(index)

    @rule(index=SITES)
    def enter_again(self, index: int) -> None:
        if index in self.alive:
            asked(lambda: self.sites[index].ask("enter", **self.entered[index]))

    @rule(index=SITES, is_done=st.sampled_from([True, True, False]), changes=st.booleans())
    def vote(self, index: int, is_done: bool, changes: bool) -> None:
        plan = self.plan_of(index)
        if plan is not None:
            for done in (is_done, is_done != changes):  # the first one counts
                if asked(lambda done=done: self.sites[index].vote(plan.attempt, done)) is None:
                    self.votes.setdefault(plan.attempt, {}).setdefault(index, done)

    def plan_of(self, index: int) -> RoundPlan | None:
        reply = asked(self.sites[index].poll) if index in self.alive else None
        if not reply or not reply["is_ready"]:
            return None
        plan = RoundPlan.model_validate(reply["plan"])
        same, entered = self.plans.setdefault(plan.attempt, (plan, {}))
        assert plan == same
        entered[index] = self.entered[index]
        return plan

    @rule(tokens=st.lists(st.integers(1, 9), min_size=3, max_size=3))
    def make_round(self, tokens: list[int]) -> None:
        """All that are alive do all that they should, so that there is a round."""
        for index in self.alive:
            self.plan_of(index)
        before = set(self.plans)
        polls = {index: asked(self.sites[index].poll) for index in self.alive}
        for index, reply in polls.items():
            if reply is None or reply["is_ready"]:
                self.enter(index, 0, tokens[index])
        plans = [self.plan_of(index) for index in self.alive]
        for index in self.alive:
            self.vote(index, True, False)
        self.hear_verdicts()
        for plan in plans:
            if plan is not None and plan.attempt not in before and not plan.refusal:
                assert self.verdicts.get(plan.attempt) or set(plan.members) - self.alive

    @rule(seconds=st.sampled_from([2, 20, WINDOW]), stopped=st.sets(SITES, max_size=2))
    def pass_time(self, seconds: float, stopped: set[int]) -> None:
        self.server.pass_time(seconds, *(self.sites[index] for index in self.alive - stopped))

    @rule(index=SITES, says_so=st.booleans())
    def end(self, index: int, says_so: bool) -> None:
        if index in self.alive and says_so:
            asked(lambda: self.sites[index].ask("leave"))
        self.alive.discard(index)

    @rule()
    def restart(self) -> None:
        self.server.restart()

    @rule(number=st.integers(1, 3))
    def fill(self, number: int) -> None:
        fill_disk(self.server.state.store, number)

    @invariant()
    def hear_verdicts(self) -> None:
        """The same ones forever, and only those for which all have voted."""
        for _ in range(4):
            self.server.state.tick()  # where the disk was full
        committed = []
        for attempt, (plan, entered) in self.plans.items():
            self.check_plan(plan, entered)
            verdict = self.sites[plan.members[0]].verdict(attempt)
            if verdict is None:
                assert attempt not in self.verdicts
                continue
            is_first = attempt not in self.verdicts
            assert self.verdicts.setdefault(attempt, verdict) is verdict
            if verdict:
                committed.append(plan.number)
                assert self.votes[attempt] == dict.fromkeys(plan.members, True)
            if verdict and is_first:
                for index in plan.members:
                    self.sites[index].take(plan)
        records = self.server.state.store.records_after(-1)
        numbers = [record["number"] for record in records]
        assert numbers == committed == sorted(numbers)

    def check_plan(self, plan: RoundPlan, entered: dict[int, dict[str, Any]]) -> None:
        """Against what its members have entered, as far as these have seen it."""
        assert list(plan.members) == sorted({*plan.members, *entered})
        weights = dict(zip(plan.members, plan.weights, strict=True))
        giving = {index: one for index, one in entered.items() if weights[index]}
        assert not set(giving) & set(plan.takers)
        for (a, one), (b, other) in combinations(giving.items(), 2):
            assert weights[a] * other["tokens"] == weights[b] * one["tokens"]
        for index, one in giving.items():
            assert (plan.fragment, one["number"] < plan.number) == (one["fragment"], True)
            assert all(one["tokens_seen"] >= its["tokens_seen"] for its in entered.values()), index
        if plan.fragment is not None:
            assert set(plan.takers) == {index for index in plan.members if not weights[index]}


class ServerOrders(RuleBasedStateMachine):
    """Two sites that send, deliver, are late, leave and ask twice."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = new_folder()
        self.now = 0.0
        self.state = self.started()
        self.sites = [ServerSite(self.state, 0, "float32"), ServerSite(self.state, 1, "float32")]
        self.sent: dict[str, tuple[Weights, dict[str, Any]]] = {}
        self.last: dict[int, str] = {}
        self.number = 0
        self.weights = start()
        self.momentum = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        for site in self.sites:
            site.join(self.weights)

    def started(self) -> OuterServerState:
        rules = Rules(False, WINDOW)
        return OuterServerState(
            ServerDirectory(self.folder), rules, lambda _: None, lambda: self.now
        )

    def teardown(self) -> None:
        self.state.store.close()
        shutil.rmtree(self.folder)

    @rule(index=st.integers(0, 1), seed=st.integers(0, 99), tokens=st.integers(1, 9))
    def send(self, index: int, seed: int, tokens: int) -> None:
        site = self.sites[index]
        local = changed(site.weights, seed)
        attempt = asked(lambda: site.send(local))
        if attempt is not None:
            self.sent[attempt] = local, site.delivery(attempt, tokens)
            self.last[index] = attempt

    @rule(index=st.integers(0, 1))
    def deliver(self, index: int) -> None:
        """Also for a second time."""
        if index in self.last:
            _, delivery = self.sent[self.last[index]]
            asked(lambda: self.sites[index].ask("deliver", **delivery))

    @rule(index=st.integers(0, 1), seed=st.integers(0, 99))
    def train(self, index: int, seed: int) -> None:
        self.send(index, seed, 5)
        self.deliver(index)

    @rule(index=st.integers(0, 1))
    def take(self, index: int) -> None:
        asked(lambda: self.sites[index].take("full"))

    @rule(index=st.integers(0, 1))
    def join(self, index: int) -> None:
        asked(lambda: self.sites[index].join({}))

    @rule(index=st.integers(0, 1))
    def leave(self, index: int) -> None:
        asked(lambda: self.sites[index].ask("leave"))

    @rule(seconds=st.sampled_from([1.0, WINDOW]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def restart(self) -> None:
        self.state.store.close()
        self.state = self.started()
        for site in self.sites:
            site.ledger = self.state

    @rule(number=st.integers(1, 3))
    def fill(self, number: int) -> None:
        fill_disk(self.state.store, number)

    @invariant()
    def weights_are_those_of_the_rounds(self) -> None:
        """Of what was sent, each attempt once, in a plain mean."""
        for _ in range(4):
            self.state.tick()
        store = self.state.store
        for record in store.records_after(self.number):
            self.number += 1
            assert record["number"] == self.number
            used = {int(site): self.sent.pop(one) for site, one in record["attempts"].items()}
            assert record["sites"] == sorted(used)
            total = sum(delivery["tokens"] for _, delivery in used.values())
            for name, weight in self.weights.items():
                mean = torch.zeros(weight.shape, dtype=torch.float64)
                for site in sorted(used):
                    local, delivery = used[site]
                    mean.add_(local[name].double(), alpha=delivery["tokens"])
                mean = mean.div_(total).float()
                outer_update(weight, self.momentum[name], mean, section("float32"))
            for site, attempt in list(self.last.items()):
                if attempt not in self.sent:
                    del self.last[site]
        tensors = store.state()
        assert tensors is not None
        assert torch.equal(tensors["weights"], flat(self.weights))
        assert torch.equal(tensors["momentum"], flat(self.momentum))
        assert self.state.summary()["number"] == self.number


def flat(tensors: Weights) -> torch.Tensor:
    return torch.cat([tensors[name].reshape(-1) for name in sorted(SHAPES)])


TestDirectOrders = DirectOrders.TestCase
TestDirectOrders.settings = ORDERS
TestServerOrders = ServerOrders.TestCase
TestServerOrders.settings = ORDERS
