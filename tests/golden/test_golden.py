"""The golden runs compute what they did: to the last bit where plain transformers does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.golden import runs
from tests.support.lives import Server

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1800)]

EXPECTED: dict[str, Any] = json.loads(runs.FIGURES.read_text())
# Elsewhere: of other instructions and libraries, after 6 or 50 steps of a float32 run.
TOLERANCE = 1e-2

ZERO_12 = "norms in one call, planned reduction"
ZERO_3 = "module hooks"
SPEED_PATCHES = {
    "ZeRO 0, bfloat16, recompute, chunked loss": [
        "no reduction for one replica, one overflow check"
    ],
    "ZeRO 3, packed": [ZERO_3],
    "ZeRO 1, experts divided, their biases updated": ["norms in one call"],
    "pipeline": ["none"],
    "tensor parallel x pipeline": ["none"],
    "ZeRO 3, chat, packed, then tensor parallel": [ZERO_3, ZERO_12],
}
"""Replaced parts of DeepSpeed by life of a run; `ZERO_12` in the others. Without them the numbers
are the same to the last bit, so only this list notices that they are gone."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(tmp_path_factory.mktemp("lives"), runs.PORTABLE_ARITHMETIC)
    yield started
    started.close()


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return runs.write_datasets(tmp_path_factory.mktemp("datasets"))


@pytest.fixture(scope="module")
def same_arithmetic(server: Server) -> bool:
    return runs.canary(server) == EXPECTED["canary"]


def test_the_set_is_the_one_that_was_written_down() -> None:
    names = {"canary", "dataset text", "dataset chat", *runs.RUNS}
    assert EXPECTED.keys() == names


@pytest.mark.parametrize("name", ["text", "chat"])
def test_datasets(name: str, datasets: dict[str, Path]) -> None:
    assert runs.dataset_figures(datasets[name]) == EXPECTED[f"dataset {name}"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if run.slow else [])
        for name, run in runs.RUNS.items()
    ],
)
def test_runs(
    name: str,
    server: Server,
    datasets: dict[str, Path],
    same_arithmetic: bool,
    tmp_path: Path,
) -> None:
    directory = runs.run_golden(runs.RUNS[name], server, datasets, tmp_path)
    log = (directory / "log.txt").read_text().splitlines()
    patches = [line.partition("speed patches: ")[2] for line in log if "speed patches: " in line]
    assert patches == SPEED_PATCHES.get(name, [ZERO_12])
    figures, expected = runs.run_figures(directory), EXPECTED[name]
    if same_arithmetic:
        assert figures["metrics"] == expected["metrics"]
        assert figures == expected
        return
    assert figures["checkpoints"].keys() == expected["checkpoints"].keys()
    assert [line.keys() for line in figures["metrics"]] == [
        line.keys() for line in expected["metrics"]
    ]
    for ours, theirs in zip(figures["metrics"], expected["metrics"], strict=True):
        assert ours == pytest.approx(theirs, rel=TOLERANCE)
