"""The curves over ranks are measured and drawn; what they are, no test asserts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import scale
from benchmarks.support.pictures import log_log_picture

DEAR = {"moe", "moe_first", "trials"}


@pytest.mark.parametrize(
    "part",
    [pytest.param(part, marks=[pytest.mark.slow] if part in DEAR else []) for part in scale.PARTS],
)
def test_every_part_is_measured(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIGTRAIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    for num_ranks in (8, 16):
        directory = tmp_path / "work" / str(num_ranks)
        directory.mkdir()
        cost = scale.PARTS[part](num_ranks, 3, directory)
        assert cost["seconds"] >= 0
        json.dumps(cost)


@pytest.mark.parametrize("part", ["agree", "fetch"])
def test_messages_of_a_restart_from_memory_grow_as_the_logarithm(part: str, tmp_path: Path) -> None:
    """A doubling of the ranks adds no more messages one after the other, and bytes of the busiest
    rank, than the one before."""
    costs = []
    for num_ranks in (16, 32, 64):
        directory = tmp_path / str(num_ranks)
        directory.mkdir()
        costs.append(scale.PARTS[part](num_ranks, 3, directory))
    for unit, slack in (("rounds", 2), ("bytes", 100)):
        first, *more = (b[unit] - a[unit] for a, b in itertools.pairwise(costs))
        assert max(more) <= first + slack, (unit, first, more)


def test_the_exponent_is_that_of_a_power() -> None:
    for power in (0, 0.5, 1, 2):
        points = {ranks: 3.0 * ranks**power for ranks in scale.RANKS}
        assert scale.exponent(points) == pytest.approx(power)


def test_the_picture_has_a_line_for_every_part() -> None:
    lines = {"save": {8: 0.1, 64: 0.1}, "commit": {8: 0.001, 64: 2.0}, "flat": {8: 0.0, 64: 0.0}}
    tree = ElementTree.fromstring(log_log_picture("title", lines))
    assert len(tree.findall("{*}polyline")) == 3
    texts = [text.text for text in tree.findall("{*}text")]
    assert {"title", "ranks", *lines} <= set(texts)
