"""An outer server that is killed at random operations, and whose disk is full for a while."""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from bigtrain.sites.client import RefusedByServerError, ServerClient
from bigtrain.sites.codecs import CODECS
from bigtrain.sites.protocol import MOST_STEP, RoundPlan, digest_of
from bigtrain.sites.rectangles import ParameterBox, decode_rectangles
from bigtrain.sites.server.store import ServerDirectory
from bigtrain.system.boxes import Box
from tests.support.fork_outer_server import TOKEN
from tests.support.outer_server_lives import ServerLives, random_kills
from tests.support.tiers import FULL

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

NUM_KILLS = 50 if FULL else 3
NUM_FULL_DISKS = 5 if FULL else 1
SHAPE = (40, 50)
BOXES = [["w", [0, 0], [25, 50]], ["w", [25, 0], [15, 50]]]
"""Two parts, as two ranks send them."""


class ServerSite:
    """A site of two ranks that exchanges by way of the server, rounded to int8 with feedback."""

    def __init__(self, index: int, address: str) -> None:
        self.index, self.client = index, ServerClient(address, TOKEN)
        self.codec = CODECS["int8"]
        self.weights = torch.zeros(SHAPE)
        self.errors = [torch.zeros(box[2][0] * box[2][1]) for box in BOXES]
        self.number = 0

    def ask(self, action: str, payload: bytes = b"", **header: Any) -> tuple[Any, memoryview]:
        header |= {"site": self.index, "run": f"{self.index:x}"}
        return self.client.ask(action, header, payload, deadline=time.monotonic() + 90)

    def join(self) -> None:
        request = {
            "facts": {},
            "sites": {"count": 2, "inner_steps": 5, "codec": "int8"},
            "parameters": [["w", list(SHAPE)]],
        }
        while True:
            state, _ = self.ask("join", **request)
            try:
                if state["uploads"]:
                    for box in BOXES:
                        values = torch.full(box[2], 0.5)
                        self.ask("upload", values.numpy().tobytes(), boxes=[box])
                    self.ask("uploaded")
                break
            except RefusedByServerError:  # it was killed meanwhile, and has no part of them
                continue
        self.take(self.wait(-1), "full")

    def wait(self, base: int) -> Any:
        while True:
            state, _ = self.ask("wait", base=base, seconds=10.0)
            if state["is_ready"] and state["number"] > base:
                return state

    def deliver(self) -> None:
        """What it has trained depends on its weights."""
        generator = torch.Generator().manual_seed(100 * self.number + self.index)
        change = self.weights * 0.01 + 0.01 * torch.randn(SHAPE, generator=generator)
        attempt = secrets.token_hex(8)
        for rank, box in enumerate(BOXES):
            values = part(change, box) + self.errors[rank]
            codes = self.codec.encode(values.unsqueeze(0))
            self.errors[rank] = values - self.codec.decode(codes, len(values))[0]
            place = {"attempt": attempt, "rank": rank, "part": 0, "boxes": [box]}
            self.ask("contribute", codes.numpy().tobytes(), **place)
        numbers = {"base": self.number, "step": 5 * (self.number + 1), "last_step": MOST_STEP}
        numbers["tokens"] = 10 + self.index
        state, _ = self.ask("deliver", attempt=attempt, num_messages=2, **numbers)
        assert "late" not in state

    def take(self, state: Any, form: str) -> None:
        for box in BOXES:
            reply, payload = self.ask("weights", number=state["number"], form=form, boxes=[box])
            is_update = reply["form"] == "update"
            codec = self.codec if is_update else CODECS["float32"]
            shape = ParameterBox(tuple(box[1]), tuple(box[2]), "w")
            values = decode_rectangles(codec, payload, [(shape, SHAPE)]).view(box[2])
            place = self.weights[shape.slices]
            place.copy_(place + values if is_update else values)
        self.number = state["number"]


def part(full: torch.Tensor, box: Any) -> torch.Tensor:
    return full[Box(tuple(box[1]), tuple(box[2])).slices].reshape(-1)


def train_by_server(lives: ServerLives, is_over: Callable[[int], bool]) -> torch.Tensor:
    """The weights when the rounds are over; those of both sites are the same."""
    sites = [ServerSite(index, lives.address) for index in range(2)]
    for site in sites:
        site.join()
    while not is_over(sites[0].number):
        for site in sites:
            site.deliver()
        for site in sites:
            site.take(site.wait(site.number), "update")
    assert torch.equal(sites[0].weights, sites[1].weights)
    return sites[0].weights


def assert_sound(directory: Path) -> int:
    """The database has every round once, and there is no file that no row names."""
    with closing(ServerDirectory(directory)) as store:
        numbers = [record["number"] for record in store.records_after(-1, limit=1_000_000)]
    assert numbers == list(range(len(numbers)))
    assert not list(directory.glob("parts/*"))
    assert len(list(directory.glob("state-*"))) == 1
    return numbers[-1]


@pytest.mark.slow
def test_kills_of_the_server_change_no_bit_of_the_weights(tmp_path: Path) -> None:
    lives = ServerLives(tmp_path / "killed")
    with lives.running(random_kills(NUM_KILLS, 180, seed=1)):
        killed = train_by_server(lives, lambda number: lives.num_kills >= NUM_KILLS and number > 4)
    assert lives.num_kills == NUM_KILLS
    number = assert_sound(lives.directory / "state")
    through = ServerLives(tmp_path / "through")
    with through.running(lambda _: 0):
        expected = train_by_server(through, lambda done: done == number)
    assert through.num_kills == 0
    print(f"{number} rounds, {through.num_operations} operations undisturbed")
    assert torch.equal(killed, expected)


@pytest.mark.slow
def test_a_disk_that_is_full_for_a_while_changes_no_bit_of_the_weights(tmp_path: Path) -> None:
    """From random moments on, until the server has logged it."""
    lives = ServerLives(tmp_path / "full")
    chosen = random.Random(3)
    num_full = 0
    is_training = threading.Event()

    def fill() -> None:
        nonlocal num_full
        is_training.wait()
        while num_full < NUM_FULL_DISKS:
            time.sleep(chosen.uniform(0, 0.2))
            before = lives.log.read_text().count("could not")
            lives.full.touch()
            while lives.log.read_text().count("could not") == before:
                time.sleep(0.01)
            lives.full.unlink()
            num_full += 1

    def is_over(number: int) -> bool:
        is_training.set()
        return num_full == NUM_FULL_DISKS and number > 2

    filling = threading.Thread(target=fill, daemon=True)
    filling.start()
    with lives.running(lambda _: 0):
        filled = train_by_server(lives, is_over)
    filling.join(20)
    number = assert_sound(lives.directory / "state")
    through = ServerLives(tmp_path / "through")
    with through.running(lambda _: 0):
        expected = train_by_server(through, lambda done: done == number)
    assert torch.equal(filled, expected)
    print(f"{num_full} full disks in {number} rounds")


class DirectSite(threading.Thread):
    """A site of a direct run: exchanges by memory as the plan says, moves when it counts."""

    def __init__(self, index: int, address: str, shared: dict[Any, Any], is_over: Any) -> None:
        super().__init__(daemon=True)
        self.index, self.client = index, ServerClient(address, TOKEN)
        self.shared, self.is_over = shared, is_over
        self.value, self.number, self.tokens_seen = 1.0, 0, 0
        self.failure: BaseException | None = None

    def ask(self, action: str, payload: bytes = b"", **header: Any) -> Any:
        header |= {"site": self.index, "run": f"{self.index:x}"}
        return self.client.ask(action, header, payload, deadline=time.monotonic() + 90)[0]

    def run(self) -> None:
        try:
            self.ask(
                "join",
                facts={},
                sites={"count": 2, "inner_steps": 5},
                parameters=[["w", [1]]],
                exchange="direct",
                layout=digest_of(b"{}"),
            )
            self.ask("layout", b"{}")
            self.round(None)
            while not self.is_over(self.number):
                self.round(0)
        except BaseException as error:
            self.failure = error
            raise

    def round(self, fragment: int | None) -> None:
        """Enter until it counts."""
        local = self.value * 1.01 + 0.001 * self.index
        while True:
            plan = self.plan(fragment)
            self.shared[plan.attempt, self.index] = local
            is_done = True
            try:
                key = f"{plan.attempt}/{self.index}"
                self.ask("put", b"here", generation=plan.generation, key=key)
            except RefusedByServerError:  # it was killed meanwhile: there is no handshake
                is_done = False
            vote = {"attempt": plan.attempt, "is_done": is_done, "seconds": 10.0}
            while not (reply := self.ask("vote", **vote))["is_decided"]:
                pass
            if reply["is_committed"]:
                break
        if fragment is not None:
            values = [self.shared[plan.attempt, site] for site in plan.members]
            self.value = sum(v * w for v, w in zip(values, plan.weights, strict=True))
            self.value /= sum(plan.weights)
        self.number, self.tokens_seen = plan.number, plan.tokens_seen

    def plan(self, fragment: int | None) -> RoundPlan:
        entry = {
            "entry": secrets.token_hex(8),
            "number": self.number,
            "step": 5 * self.number,
            "last_step": MOST_STEP,
            "fragment": fragment,
            "is_last": False,
            "tokens": 0 if fragment is None else 10 + self.index,
            "digest": digest_of(repr(self.value).encode()),
            "tokens_seen": self.tokens_seen,
            "seconds": 10.0,
        }
        while not (reply := self.ask("enter", **entry))["is_ready"]:
            pass
        return RoundPlan.model_validate(reply["plan"])


def train_directly(lives: ServerLives, is_over: Callable[[int], bool]) -> tuple[int, float]:
    shared: dict[Any, Any] = {}
    over_at: list[int] = []
    lock = threading.Lock()

    def over(number: int) -> bool:
        """Decided once, by the first that asks, for the round after it too."""
        with lock:
            if not over_at and is_over(number):
                over_at.append(number + 1)
            return bool(over_at) and number >= over_at[0]

    sites = [DirectSite(index, lives.address, shared, over) for index in range(2)]
    for site in sites:
        site.start()
    for site in sites:
        site.join(600)
        assert site.failure is None
    assert sites[0].value == sites[1].value
    assert sites[0].number == sites[1].number
    return sites[0].number, sites[0].value


@pytest.mark.slow
def test_kills_of_the_server_make_no_direct_round_twice_or_partly(tmp_path: Path) -> None:
    lives = ServerLives(tmp_path / "killed")
    with lives.running(random_kills(NUM_KILLS, 120, seed=2)):
        killed = train_directly(lives, lambda n: lives.num_kills >= NUM_KILLS and n > 4)
    assert lives.num_kills == NUM_KILLS
    through = ServerLives(tmp_path / "through")
    with through.running(lambda _: 0):
        expected = train_directly(through, lambda number: number + 1 >= killed[0])
    assert killed == expected
