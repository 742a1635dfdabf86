"""An outer server's mathematics against exchanges between sites, and who takes part in a step."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bigtrain.settings.sections.sites import SitesSection
from bigtrain.sites.codecs import CODECS, BlockCodec
from bigtrain.sites.outer_optimizer import outer_update
from bigtrain.sites.protocol import RefusedError, parse_request
from bigtrain.sites.rectangles import (
    ParameterBox,
    Update,
    decode_rectangles,
    join_rectangles,
    touched_blocks,
)
from bigtrain.sites.server.deliveries import staleness_weight
from bigtrain.sites.server.members import Rules
from bigtrain.sites.server.state import OuterServerState
from bigtrain.sites.server.store import ServerDirectory

SHAPES = {"a.weight": (7, 5), "b.weight": (300,), "c.weight": (2, 3, 4)}
HALVES = {
    "a.weight": [((0, 0), (7, 2)), ((0, 2), (7, 3))],
    "b.weight": [((0,), (100,)), ((100,), (200,))],
    "c.weight": [((0, 0, 0), (1, 3, 4)), ((1, 0, 0), (1, 3, 4))],
}
SITES: dict[str, Any] = {
    "count": 2,
    "inner_steps": 5,
    "outer": {"type": "nesterov", "lr": 0.7, "momentum": 0.8},
}
LAST_STEP = 1000
LOST = {"float32": 1e-6, "bfloat16": 0.1 / 2**8, "int8": 0.1 / 127, "int4": 0.1 / 7}
"""An outer step changes no weight here by 0.1: half a scale is lost on the way there, and half on
the way back."""
Weights = dict[str, torch.Tensor]


def section(codec: str) -> SitesSection:
    return SitesSection.model_validate(
        {**SITES, "codec": codec, "server": "http://a:1", "token_file": "t"}
    )


def answer(
    state: OuterServerState, action: str, payload: bytes = b"", **header: Any
) -> tuple[Any, bytes]:
    """Header and payload of the reply, after the checks of the HTTP side."""
    header = {"run": f"{header['site']:016x}", **header}
    return state.act(action, parse_request(action, header), memoryview(payload))


class Site:
    """A site of one rank that holds whole parameters, or of two that hold halves."""

    def __init__(
        self, ledger: OuterServerState, index: int, codec: str, *, halves: bool = False
    ) -> None:
        self.ledger, self.index, self.codec = ledger, index, CODECS[codec]
        self.relative = self.codec.is_relative or ledger.rules.is_asynchronous
        self.boxes = [
            [ParameterBox((0,) * len(s), s, n) for n, s in SHAPES.items()]
            if not halves
            else [ParameterBox(*HALVES[name][rank], name) for name in SHAPES]
            for rank in range(2 if halves else 1)
        ]
        self.weights: Weights = {}
        self.errors: list[torch.Tensor] = [
            torch.zeros(sum(box.num_elements for box in boxes)) for boxes in self.boxes
        ]
        self.number = self.step = 0
        facts = {"facts": {"data": "x"}, "sites": {**SITES, "codec": codec}}
        parameters = sorted((name, list(shape)) for name, shape in SHAPES.items())
        self.request = json.loads(json.dumps({**facts, "parameters": parameters}))

    def join(self, start: Weights) -> dict[str, Any]:
        state = self.ask("join", **self.request)
        if state["uploads"]:
            for boxes in self.boxes:
                flat = torch.cat([start[box.name][box.slices].reshape(-1) for box in boxes])
                header = {"boxes": [box.to_json() for box in boxes]}
                self.ask("upload", flat.numpy().tobytes(), **header)
            self.ask("uploaded")
        self.weights = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.take("full")
        return state

    def ask(self, action: str, payload: bytes = b"", **header: Any) -> Any:
        return answer(self.ledger, action, payload, site=self.index, **header)[0]

    def send(self, local: Weights) -> str:
        """All messages of an attempt, not delivered yet."""
        attempt = secrets.token_hex(8)
        for rank, boxes in enumerate(self.boxes):
            values = torch.cat([local[box.name][box.slices].reshape(-1) for box in boxes])
            if self.relative:
                values -= torch.cat(
                    [self.weights[box.name][box.slices].reshape(-1) for box in boxes]
                )
            if self.codec.keeps_error:
                values = values + self.errors[rank]
            codes = self.codec.encode(values.unsqueeze(0))
            self.sent = self.codec.decode(codes, len(values))[0]
            self.errors[rank] = values - self.sent
            header = {"rank": rank, "part": 0, "boxes": [box.to_json() for box in boxes]}
            self.ask("contribute", codes.numpy().tobytes(), attempt=attempt, **header)
        return attempt

    def deliver(self, local: Weights, tokens: int = 100) -> dict[str, Any]:
        self.step += 5
        return self.ask("deliver", **self.delivery(self.send(local), tokens))

    def delivery(self, attempt: str, tokens: int = 100) -> dict[str, Any]:
        return {
            **{"attempt": attempt, "base": self.number, "step": self.step, "last_step": LAST_STEP},
            **{"tokens": tokens, "num_messages": len(self.boxes)},
        }

    def take(self, form: str = "update") -> None:
        number = self.ledger.summary()["number"]
        for boxes in self.boxes:
            header = {"number": number, "form": form, "boxes": [box.to_json() for box in boxes]}
            reply, payload = answer(self.ledger, "weights", site=self.index, **header)
            is_update = reply["form"] == "update"
            codec = self.codec if is_update else CODECS["float32"]
            pairs = [(box, SHAPES[box.name]) for box in boxes]
            values = decode_rectangles(codec, memoryview(payload), pairs)
            begin = 0
            for box in boxes:
                value = values[begin : begin + box.num_elements].view(box.sizes)
                place = self.weights[box.name][box.slices]
                place.copy_(place + value if is_update and codec.is_relative else value)
                begin += box.num_elements
        self.number = number


def changed(weights: Weights, seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: weight + 1e-2 * torch.randn(weight.shape, generator=generator)
        for name, weight in weights.items()
    }


def start() -> Weights:
    return changed({name: torch.ones(shape) for name, shape in SHAPES.items()}, 0)


def quiet(_text: str) -> None:
    pass


_STORES: dict[Path, ServerDirectory] = {}


def ledger_at(
    path: Path,
    *,
    asynchronous: bool = False,
    seconds: float = 1000.0,
    say: Callable[[str], None] = quiet,
) -> OuterServerState:
    if path in _STORES:  # of the server before: one at a time
        _STORES[path].close()
    _STORES[path] = ServerDirectory(path)
    return OuterServerState(_STORES[path], Rules(asynchronous, seconds), say)


def joined(ledger: OuterServerState, codec: str = "float32", *, halves: bool = False) -> list[Site]:
    """Two sites that have joined; `halves`: the second one has two ranks."""
    sites = [Site(ledger, 0, codec), Site(ledger, 1, codec, halves=halves)]
    for site in sites:
        site.join(start())
    return sites


@pytest.mark.parametrize("codec", CODECS)
def test_steps_of_sites_with_other_layouts_are_those_of_a_plain_mean(
    codec: str, tmp_path: Path
) -> None:
    ledger = ledger_at(tmp_path)
    sites = [Site(ledger, 0, codec), Site(ledger, 1, codec, halves=True)]
    expected, momentum = start(), {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    exact = {name: weight.clone() for name, weight in expected.items()}
    for site in sites:
        site.join(expected)
        for name, weight in expected.items():
            assert torch.equal(site.weights[name], weight)
    for number in range(3):
        locals_ = [changed(site.weights, 10 * number + i) for i, site in enumerate(sites)]
        for site, local, tokens in zip(sites, locals_, (100, 300), strict=True):
            state = site.deliver(local, tokens)
        assert state["number"] == number + 1
        assert state["sites"] == [0, 1]
        assert state["step"] == 5 * (number + 1)
        for name in SHAPES:
            base = expected[name] if codec == "float32" else sites[0].weights[name]
            changes = [local[name] - base for local in locals_]
            mean = base + (changes[0] + 3 * changes[1]) / 4
            outer_update(exact[name], momentum[name], mean, section(codec))
        for site in sites:
            site.take()
        for name, weight in sites[0].weights.items():
            assert torch.equal(weight, sites[1].weights[name])
            torch.testing.assert_close(weight, exact[name], rtol=0, atol=LOST[codec])
        if codec == "float32":
            expected = {name: weight.clone() for name, weight in exact.items()}


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_what_a_server_loses_by_rounding_it_tells_later(codec: str, tmp_path: Path) -> None:
    """Its weights and what it has kept are what a server would have that rounds nothing."""
    ledger = ledger_at(tmp_path)
    site = Site(ledger, 0, codec)
    site.request["sites"]["count"] = 1
    site.join(start())
    exact = torch.cat([site.weights[name].reshape(-1) for name in SHAPES])
    momentum = torch.zeros_like(exact)
    for number in range(6):
        site.deliver(changed(site.weights, number))
        outer_update(exact, momentum, exact + site.sent, section(codec))
        site.take()
    state = ledger.store.state() or {}
    assert state["error"].any()
    torch.testing.assert_close(state["weights"] + state["error"], exact, rtol=0, atol=2e-6)
    held = torch.cat([site.weights[name].reshape(-1) for name in SHAPES])
    assert torch.equal(held, state["weights"])


def test_a_rectangle_of_an_update_means_the_same_whatever_else_is_cut() -> None:
    generator = torch.Generator().manual_seed(3)
    full = torch.randn(13, 70, generator=generator)
    for name, codec in CODECS.items():
        update = Update(codec, full)
        for box in (
            ParameterBox((0, 0), (13, 70), "w"),
            ParameterBox((3, 0), (5, 70), "w"),
            ParameterBox((0, 11), (13, 7), "w"),
            ParameterBox((12, 69), (1, 1), "w"),
        ):
            payload = memoryview(join_rectangles(codec, [update.cut(box)] * 2))
            values = decode_rectangles(codec, payload, [(box, (13, 70))] * 2)
            assert torch.equal(values, update.values[box.slices].reshape(-1).repeat(2)), (name, box)
        if isinstance(codec, BlockCodec):
            whole = codec.decode(codec.encode(full.view(1, -1)), full.numel())
            assert torch.equal(update.values.view(1, -1), whole)
    touched, places = touched_blocks((13, 70), ParameterBox((0, 11), (2, 3), "w"), 64)
    assert touched.tolist() == [0, 1]
    assert places.tolist() == [0, 0, 0, 1, 1, 1]


def test_a_site_that_misses_a_window_is_left_out_and_takes_the_weights_when_it_is_back(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    ledger = ledger_at(tmp_path, seconds=0.05, say=said.append)
    first, second = joined(ledger)
    local = changed(first.weights, 1)
    assert first.deliver(local)["number"] == 0  # the other is waited for
    assert ledger.wait(0, 0.2)["number"] == 0
    ledger.tick()
    state = ledger.summary()
    assert (state["number"], state["sites"]) == (1, [0])
    assert (
        "site 1 missed outer step 1 by more than 0.05 s: not waited for until they are back" in said
    )
    first.take()
    # Alone it does not wait.
    assert first.deliver(changed(first.weights, 2))["number"] == 2
    first.take()
    late = second.deliver(changed(second.weights, 3))
    assert late["late"] is True
    assert late["number"] == 2
    second.take("full")
    for name, weight in first.weights.items():
        assert torch.equal(weight, second.weights[name])
    # From now on it is waited for again.
    assert first.deliver(changed(first.weights, 4))["number"] == 2
    assert second.deliver(changed(second.weights, 5))["number"] == 3
    assert ledger.summary()["sites"] == [0, 1]
    # All sites hear of it with the outer step that follows, once.
    lines = ledger.store.records_after(-1)
    told = [[(e["event"], e["who"], e["reason"]) for e in line["events"]] for line in lines]
    missed = ("site_left_out", "site 1", "missed the outer step")
    late_then = ("site_left_out", "site 1", "late")
    assert told == [[], [missed], [], [late_then]]
    # One that was away for several outer steps hears of all since the last it knows, of a server
    # that was started again as well.
    for restarts in (False, True):
        server = ledger_at(tmp_path) if restarts else ledger
        for heard, expected in ((0, [missed, late_then]), (1, [late_then]), (3, [])):
            state = server.wait(2, 0.1, heard)
            assert [(e["event"], e["who"], e["reason"]) for e in state["events"]] == expected
        assert len(server.summary()["events"]) == 1


def test_the_others_are_told_why_a_site_was_refused(tmp_path: Path) -> None:
    ledger = ledger_at(tmp_path, seconds=0.0)
    first, second = Site(ledger, 0, "float32"), Site(ledger, 1, "float32")
    first.join(start())
    second.request["facts"]["data"] = "y"
    with pytest.raises(RefusedError, match="data: 'x' there, 'y' here"):
        second.join(start())
    first.deliver(changed(first.weights, 1))
    (event,) = ledger.summary()["events"]
    assert (event["event"], event["who"]) == ("site_left_out", "site 1")
    assert event["reason"].startswith("was refused: the server's run has other settings")
    assert event["reason"].endswith("data: 'x' there, 'y' here")


def test_a_new_site_joins_at_a_window_and_one_that_leaves_is_not_waited_for(
    tmp_path: Path,
) -> None:
    ledger = ledger_at(tmp_path, seconds=0.05)
    first, second = Site(ledger, 0, "int8"), Site(ledger, 1, "int8")
    first.join(start())
    # All are waited for at the beginning, whoever has joined.
    assert first.deliver(changed(first.weights, 1))["number"] == 0
    assert ledger.wait(0, 0.1)["number"] == 0
    ledger.tick()
    assert ledger.summary()["sites"] == [0]
    first.take()
    assert second.join({})["step"] == 5
    for name, weight in first.weights.items():
        assert torch.equal(weight, second.weights[name])
    assert first.deliver(changed(first.weights, 2))["number"] == 1
    ledger.leave(1)
    assert ledger.summary()["number"] == 2


def test_what_has_happened_is_told_after_a_restart(tmp_path: Path) -> None:
    """Once: not again by a server that was started again after it was told."""
    ledger = ledger_at(tmp_path)
    sites = joined(ledger)
    ledger.note("message_refused", "10.0.0.9", "corrupted")
    for _ in range(3):
        ledger.note("message_refused", "10.0.0.9", "forged")
        ledger.tick()
    for number in range(2):
        ledger = ledger_at(tmp_path)
        for site in sites:
            site.ledger = ledger
            site.deliver(changed(site.weights, number))
        told = [(e["who"], e["reason"], e["count"]) for e in ledger.summary()["events"]]
        of_three = ("10.0.0.9", "forged", 2)  # as the disk knew
        assert told == ([] if number else [("10.0.0.9", "corrupted", 1), of_three])
        for site in sites:
            site.take("full")


@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_a_restart_loses_nothing(codec: str, tmp_path: Path) -> None:
    """The same weights as a server that was not restarted, with what had come before."""
    ends = []
    for restarts in (False, True):
        directory = tmp_path / str(restarts)
        ledger = ledger_at(directory)
        sites = joined(ledger, codec, halves=True)
        for number in range(3):
            for index, site in enumerate(sites):
                site.deliver(changed(site.weights, 2 * number + index))
                if restarts:
                    # Between the deliveries, too, and with files that were not named yet.
                    for name in ("state-000099-ab", "parts/ab", "parts/ab.partial"):
                        (directory / name).write_bytes(b"half of")
                    ledger = ledger_at(directory)
                    for other in sites:
                        other.ledger = ledger
            for site in sites:
                site.take("full" if restarts else "update")
        assert ledger.summary()["number"] == 3
        ends.append(sites[0].weights)
    for name, weight in ends[0].items():
        assert torch.equal(weight, ends[1][name])
    states = list((tmp_path / "True").glob("state-*"))
    assert len(states) == 1  # and no more, however long it runs
    assert not list((tmp_path / "True" / "parts").iterdir())


def test_an_asynchronous_server_weighs_a_change_by_its_staleness(tmp_path: Path) -> None:
    ledger = ledger_at(tmp_path, asynchronous=True)
    first, second = joined(ledger)
    expected, momentum = start(), {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for number, (site, staleness) in enumerate([(first, 0), (first, 0), (second, 2)]):
        local = changed(site.weights, number)
        for name, weight in expected.items():
            share = (1 + staleness) ** -0.5 / 2
            target = weight + share * (local[name] - site.weights[name])
            outer_update(weight, momentum[name], target, section("float32"))
        assert site.deliver(local)["number"] == number + 1
        site.take("full")
        for name, weight in site.weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6)
    assert staleness_weight(0) == 1
    assert staleness_weight(3) == 0.5


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    ledger = ledger_at(tmp_path)
    with pytest.raises(RefusedError, match="no site has joined yet"):
        answer(ledger, "weights", site=0, number=0, form="full", boxes=[])
    site = Site(ledger, 0, "int8")
    site.join(start())
    other = Site(ledger, 1, "int8")
    other.request["facts"] = {"data": "y"}
    with pytest.raises(RefusedError, match="data: 'x' there, 'y' here"):
        other.join({})
    with pytest.raises(RefusedError, match="site 1 has not joined"):
        other.ask("uploaded")
    other.request["allowed"] = ["data"]  # as checkpoints are read with other settings
    other.join({})
    with pytest.raises(RefusedError, match="data: 'y' there, 'x' here"):
        site.join({})
    attempt = site.send(changed(site.weights, 1))
    with pytest.raises(RefusedError, match="1 of 3 messages are here"):
        site.ask("deliver", **site.delivery(attempt) | {"num_messages": 3})
    for boxes, text in (
        ([["d.weight", [0], [1]]], "no rectangle of a parameter"),
        ([["b.weight", [200], [200]]], "outside of b.weight"),
        ([["b.weight", [0], [300]]], "0 bytes where"),
    ):
        with pytest.raises(RefusedError, match=text):
            site.ask("contribute", attempt=attempt, rank=1, part=0, boxes=boxes)
    with pytest.raises(RefusedError, match=r"attempt = '\.\./\.\./x'"):
        site.ask("contribute", attempt="../../x", rank=1, part=0, boxes=[])
    with pytest.raises(RefusedError, match=r"sites\.exchange = server, not direct"):
        site.ask("vote", attempt=attempt, is_done=True)
    partial = Site(ledger, 1, "int8", halves=True)
    partial.request["facts"] = {"data": "y"}
    partial.join({})
    partial.boxes.pop()
    with pytest.raises(RefusedError, match=r"of 359 elements are here"):
        partial.deliver(changed(partial.weights, 1))
