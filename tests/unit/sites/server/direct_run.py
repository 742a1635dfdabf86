"""A direct run without sockets: a clock that tests move, and sites that ask as theirs do."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bigtrain.sites.protocol import RoundPlan, digest_of, parse_request
from bigtrain.sites.server.direct import DirectExchange
from bigtrain.sites.server.members import Rules
from bigtrain.sites.server.state import OuterServerState
from bigtrain.sites.server.store import ServerDirectory

WINDOW = 100.0
LAST_STEP = 1000
LAYOUT = b'{"ranks": 1}'


def request(state: OuterServerState, action: str, payload: bytes = b"", **header: Any) -> Any:
    """The header of the reply, after the checks of the HTTP side."""
    return state.act(action, parse_request(action, header), memoryview(payload))[0]


@dataclass
class DirectRun:
    """A server whose time stands still unless a test moves it."""

    directory: Path
    count: int = 3
    now: float = 0.0
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state = self._start()

    def _start(self) -> OuterServerState:
        rules = Rules(False, WINDOW)
        return OuterServerState(
            ServerDirectory(self.directory), rules, self.said.append, lambda: self.now
        )

    def restart(self) -> None:
        self.state.store.close()
        self.state = self._start()

    def pass_time(self, seconds: float, *alive: Site) -> None:
        """In steps of a heartbeat of those that are `alive`."""
        end = self.now + seconds
        while self.now < end:
            for site in alive:
                site.ask("heartbeat")
            self.now = min(end, self.now + 2)
            self.state.tick()


class Site:
    """A site of a direct run, which ends a round as the verdict says."""

    def __init__(self, run: DirectRun, index: int, number: int = 0, seen: int = 0) -> None:
        self.run, self.index, self.number, self.tokens_seen = run, index, number, seen
        self.digest = f"{seen:016x}"
        self.run_id = f"{index:016x}"
        self.step = number * 10
        self.entry = ""
        self.sent: dict[str, Any] = {}

    def ask(self, action: str, payload: bytes = b"", **header: Any) -> Any:
        own = {"site": self.index, "run": self.run_id}
        return request(self.run.state, action, payload, **own, **header)

    def join(self, **changes: Any) -> Any:
        header: dict[str, Any] = {
            "facts": {"data": "x"},
            "sites": {"count": self.run.count, "inner_steps": 10, "codec": "float32"},
            "parameters": [["w", [4]]],
            "exchange": "direct",
            "layout": digest_of(LAYOUT),
            "number": self.number,
            "timeout_seconds": 60.0,
        }
        reply = self.ask("join", **(header | changes))
        if reply["needs_layout"]:
            self.ask("layout", LAYOUT)
        return reply

    def enter(self, fragment: int | None = 0, tokens: int = 100) -> None:
        self.entry = secrets.token_hex(8)
        self.sent = self.entered(fragment, tokens)
        self.ask("enter", **self.sent)

    def entered(self, fragment: int | None = 0, tokens: int = 100) -> dict[str, Any]:
        return {
            "entry": self.entry,
            "number": self.number,
            "step": self.step,
            "last_step": LAST_STEP,
            "fragment": fragment,
            "is_last": fragment is not None and self.step >= LAST_STEP,
            "tokens": 0 if fragment is None else tokens,
            "digest": self.digest,
            "tokens_seen": self.tokens_seen,
        }

    def poll(self) -> Any:
        return self.ask("enter", **self.sent)

    def plan(self) -> RoundPlan:
        reply = self.poll()
        assert reply["is_ready"], reply
        return RoundPlan.model_validate(reply["plan"])

    def vote(self, attempt: str, is_done: bool = True, unusable: int | None = None) -> None:
        self.ask("vote", attempt=attempt, is_done=is_done, unusable=unusable)

    def verdict(self, attempt: str) -> bool | None:
        """Whether it counts; None if that is not decided."""
        exchange = self.run.state.exchange
        assert isinstance(exchange, DirectExchange)
        reply = exchange.verdict(attempt, 0)
        return reply["is_committed"] if reply["is_decided"] else None

    def take(self, plan: RoundPlan) -> None:
        """Have the weights after a round that counts."""
        self.number, self.tokens_seen, self.step = plan.number, plan.tokens_seen, plan.step + 10
        self.digest = f"{plan.tokens_seen:016x}"


def begin(run: DirectRun, count: int | None = None) -> list[Site]:
    """Sites of a new run, which have begun."""
    sites = [Site(run, index) for index in range(run.count if count is None else count)]
    for site in sites:
        site.join()
    for site in sites:
        site.enter(None)
    finish(sites)
    return sites


def finish(sites: list[Site]) -> RoundPlan:
    """Let a round that has its plan be made."""
    plan = sites[0].plan()
    assert [site.plan() for site in sites] == [plan] * len(sites)
    for site in sites:
        assert site.verdict(plan.attempt) is None
        site.vote(plan.attempt)
    for site in sites:
        assert site.verdict(plan.attempt) is True
        site.take(plan)
    return plan


def make_round(sites: list[Site]) -> RoundPlan:
    enter(sites)
    return finish(sites)


def enter(sites: Iterable[Site]) -> None:
    for site in sites:
        site.enter()


def join(sites: Iterable[Site]) -> None:
    """Join, and enter without a contribution."""
    for site in sites:
        site.join()
        site.enter(None)


def vote(sites: Iterable[Site], plan: RoundPlan) -> None:
    for site in sites:
        site.vote(plan.attempt)
