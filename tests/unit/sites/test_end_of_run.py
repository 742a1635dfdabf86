"""Of all exports of a run of two sites, whatever was cut or killed before its end: one set of
weights. Sites of one rank with a real server, by the calls that a run makes at its outer steps."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bigtrain.errors import LaunchError
from bigtrain.run.outer_steps import OuterSteps
from bigtrain.run.state import TrainState
from bigtrain.sites.outer_step import OuterStep
from tests.support.outer_servers import outer_server
from tests.support.worlds import free_port
from tests.unit.sites.test_through_server import parts_of_one_tensor as parts_of_one_tensor
from tests.unit.sites.test_through_server import site_of

LAST_STEP, INNER_STEPS = 6, 2
REACH: dict[str, Any] = {"inner_steps": INNER_STEPS, "timeout_seconds": 2.0}


@dataclass
class Life:
    """A site with its checkpoint: the state, the masters and what the engine saves with them."""

    index: int
    reach: dict[str, Any]
    state: TrainState = field(default_factory=TrainState)
    masters: torch.Tensor = field(default_factory=lambda: torch.zeros(4))
    added: dict[str, torch.Tensor] = field(default_factory=dict)
    step: OuterStep | None = None
    steps: OuterSteps = field(init=False)
    is_cut: bool = False
    export: torch.Tensor | None = None
    refusal: str = ""

    def start(self) -> None:
        """As a launch that resumes from the checkpoint; a run at its end makes its last step."""
        if self.step is not None:
            return
        reach = dict(self.reach)
        if self.is_cut:
            reach["server"] = f"http://127.0.0.1:{free_port()}"
        self.step, masters = site_of(self.index, "float32", reach, last_step=LAST_STEP)
        masters.copy_(self.masters)
        self.masters = masters
        for name, state in self.step.state._engine.added_states["weight"].items():
            state.copy_(self.added.get(name, state))
        steps = object.__new__(OuterSteps)
        train = SimpleNamespace(total_steps=LAST_STEP)
        plan = SimpleNamespace(global_batch_size=1, tokens_per_step=10)
        steps._context = SimpleNamespace(  # type: ignore[assignment]
            config=SimpleNamespace(sites=self.step.sites, train=train),
            heartbeat=SimpleNamespace(set_activity=lambda *_, **__: None),
            plan=plan,
            world=SimpleNamespace(is_main=True),
            log=SimpleNamespace(info=lambda _: None, metrics=None),
        )
        steps._step, self.steps = self.step, steps
        self.state = steps.begin(self.state)
        if self.state.step == LAST_STEP:
            self.state = steps.make_last(self.state)

    def train(self, until: int) -> None:
        self.start()
        while self.state.step < until:
            # Small, so that the change of a site that missed outer steps is not refused.
            self.masters += torch.arange(4.0) * (self.index + 1) / 8
            self.state = replace(self.state, step=self.state.step + 1)
            if self.steps.is_due(self.state):
                self.state = self.steps.make(self.state)
        assert self.step is not None
        states = self.step.state._engine.added_states["weight"]
        self.added = {name: state.clone() for name, state in states.items()}

    def end(self) -> None:
        """Train to the end, and export or be refused."""
        self.refusal = ""
        try:
            self.train(LAST_STEP)
            self.steps.close()
            self.steps.final_record(self.state)
            self.export = self.masters.clone()
        except LaunchError as error:
            self.refusal = str(error)
            self.kill()
        self.step = None

    def kill(self) -> None:
        """Stop the heartbeats, as the end of a process does."""
        if self.step is not None and self.step._membership is not None:
            self.step._membership._ended.set()
        self.step = None

    def cut(self) -> None:
        """Lose the route to the server."""
        self.is_cut = True
        if self.step is not None and self.step._membership is not None:
            client = self.step._membership._client

            def refuse(**_: Any) -> Any:
                raise OSError("no route to host")

            client._connect = refuse


@dataclass
class TwoSites:
    """Does what the words of a script say.

    ``up``, ``down``: the server. ``01>4``: the sites train to step 4, at the same time. ``01.``:
    they end. ``1x``: is killed, after its checkpoint. ``1/``: is cut off; ``1+``: no longer.
    """

    directory: Path
    exchange: str
    is_asynchronous: bool = False
    server: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.port = free_port()
        self.sites: list[Life] = []

    def play(self, script: str) -> None:
        for word in script.split():
            if word == "up":
                reach = self.server.enter_context(
                    outer_server(
                        self.directory,
                        window_seconds=0.4,
                        port=self.port,
                        is_asynchronous=self.is_asynchronous,
                    )
                )
                reach |= {"exchange": self.exchange, **REACH}
                self.sites = self.sites or [Life(index, reach) for index in range(2)]
                continue
            if word == "down":
                self.server.close()
                continue
            digits = [character for character in word.partition(">")[0] if character.isdigit()]
            lives, until = [self.sites[int(digit)] for digit in digits], word.partition(">")[2]
            actions = {"x": Life.kill, "/": Life.cut, ".": Life.end}
            if word.endswith("+"):
                lives[0].is_cut = False
                continue
            with ThreadPoolExecutor(2) as threads:
                if until:
                    list(threads.map(Life.train, lives, [int(until)] * len(lives)))
                else:
                    list(threads.map(actions[word[-1]], lives))


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    for module in ("server.members", "membership"):
        monkeypatch.setattr(f"bigtrain.sites.{module}.HEARTBEAT_TIMEOUT", 1.5)
    monkeypatch.setattr("bigtrain.sites.protocol.HEARTBEAT_SECONDS", 0.3)
    # Waited out where the server is gone.
    monkeypatch.setattr("bigtrain.sites.membership._LEAVE_SECONDS", 1.0)
    with ExitStack() as stack:
        yield stack


CASES = {
    # Script; sites that export in the direct exchange, and through the server.
    "nothing happens": ("up 01.", "01", "01"),
    "a slow site misses the last outer step": ("up 01>2 0. 1.", "0", "01"),
    "a site rejoins after the end": ("up 01>2 1x 0. 1.", "0", "01"),
    "one is cut off and ends alone": ("up 01>2 1/ 01. 1+ 1.", "0", "01"),
    "both are cut off, and restarted in turn": ("up 01>4 down 01. up 1. 0.", "1", "01"),
    "both are cut off, and restarted together": ("up 01>4 down 01. up 01.", "01", "01"),
    "one is cut off, ends first, and waits": ("up 01>2 1/ 1. 1+ 01.", "01", "01"),
    "a site that has ended exports again": ("up 01. down 0. 1.", "01", "01"),
    "the server is gone": ("up 01>4 down 01.", "", ""),
}


FAST = {
    ("a slow site misses the last outer step", "direct"),
    ("both are cut off, and restarted in turn", "server"),
}
SLOW = [(name, "direct") for name in CASES] + [
    ("one is cut off and ends alone", "server"),
    ("both are cut off, and restarted together", "server"),
    ("a site that has ended exports again", "server"),
    ("a slow site misses the last outer step", "asynchronous"),
    ("both are cut off, and restarted in turn", "asynchronous"),
]


@pytest.mark.parametrize(
    ("name", "exchange"),
    [
        *sorted(FAST),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW if case not in FAST),
    ],
)
def test_all_exports_have_the_weights_of_the_run(
    name: str, exchange: str, tmp_path: Path, stack: ExitStack
) -> None:
    script, direct, through_server = CASES[name]
    is_asynchronous = exchange == "asynchronous"
    sites = TwoSites(tmp_path, "direct" if exchange == "direct" else "server", is_asynchronous)
    stack.callback(sites.server.close)
    sites.play(script)
    if is_asynchronous and through_server:  # it may have taken newer weights, of no last step
        refused = [str(life.index) for life in sites.sites if life.refusal]
        sites.play(" ".join(f"{site}." for site in refused))
    exports = {life.index: life.export for life in sites.sites if life.export is not None}
    refusals = {life.index: life.refusal for life in sites.sites}
    assert "".join(map(str, exports)) == (direct if exchange == "direct" else through_server), (
        refusals
    )
    weights = list(exports.values())
    assert all(torch.equal(weights[0], other) for other in weights)
    for index, refusal in refusals.items():
        assert bool(refusal) == (index not in exports)
        if refusal:
            assert "the run" in refusal
            assert " -> " in refusal
