"""Optimizer steps on fake CUDA tensors are as on the page, and planted faults are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.gpu_proof.__main__ import PAGE, table, trace_apart
from benchmarks.gpu_proof.cases import CASES, NOT_FOLLOWED, Case
from benchmarks.gpu_proof.fake_cuda import why_not
from benchmarks.gpu_proof.trace import Collective, mismatches

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")

BY_NAME = {case.name: case for case in CASES}
FIRST_STAGE, MUON = "zero 1, pipeline 2, first stage", "zero 1, Muon"
CORE = ("zero 1", "zero 3, tensor 2", "zero 1, experts 2", FIRST_STAGE, MUON)
# By the case that they are planted in.
FAULTS = {
    "mask on the CPU": "zero 1",
    "item in the loop": "zero 1",
    "reduction in 16 bits": "zero 1",
    "count on the CPU": "zero 1",
    "functional sum on the CPU": "zero 1",
    "places on the host": "zero 1",
    "text and objects of each evaluated batch": "zero 1",
    "another group of the same size": "zero 3, tensor 2",
    "no wait in the feed": "zero 1",
    "copy that blocks": "zero 1",
    "item for each evaluated batch": "zero 1",
    "timed throughput": "zero 1",
    "read of each matrix": MUON,
    "update in float32 on one rank": MUON,
    "activations in float32 from one stage": FIRST_STAGE,
}
# What ranks that are traced together do differently.
MISMATCHES = {
    "activations in float32 from one stage": (
        "exchange 1: rank 0 sends 1,048,576 float32, rank 1 receives 1,048,576 bfloat16"
    ),
    "update in float32 on one rank": (
        "rank 0 alltoall_base float32, rank 1 alltoall_base bfloat16"
    ),
}
Traced = dict[str, Any] | str


@pytest.fixture(scope="module")
def traced() -> dict[str, Traced]:
    """What the core cases did by name, and the first of them by the fault planted in it."""
    wanted = [(BY_NAME[name], "") for name in CORE]
    wanted += [(BY_NAME[case], fault) for fault, case in FAULTS.items()]
    answers = [answer for _, answer in trace_apart(wanted)]
    return dict(zip((*CORE, *FAULTS), answers, strict=True))


def is_on_the_page(case: Case, traced: Traced) -> None:
    assert not isinstance(traced, str), traced
    assert traced["problems"] == []
    lines = table(case, traced)
    assert lines in PAGE.read_text(), f'make gpu-proof ARGS="--write"\n{lines}'


@pytest.mark.slow
@pytest.mark.parametrize("name", CORE)
def test_core_steps_are_as_on_the_page(name: str, traced: dict[str, Traced]) -> None:
    is_on_the_page(BY_NAME[name], traced[name])


@pytest.mark.slow
def test_other_steps_are_as_on_the_page() -> None:
    """Every third; `make gpu-proof` compares all."""
    others = [(case, "") for case in CASES if case.name not in CORE][::3]
    for case, answer in trace_apart(others):
        is_on_the_page(case, answer)


def test_page_has_every_case_and_what_is_not_followed() -> None:
    page = PAGE.read_text()
    headings = [line[4:] for line in page.splitlines() if line.startswith("### ")]
    assert headings == [name[0].upper() + name[1:] for name in BY_NAME]
    for name, reason in NOT_FOLLOWED.items():
        assert f"| {name} | {reason} |" in page


@pytest.mark.slow
def test_faults_are_found(traced: dict[str, Traced]) -> None:
    error = traced["mask on the CPU"]
    assert isinstance(error, str)
    assert "cuda:0" in error
    assert "cpu" in error
    error = traced["count on the CPU"]
    assert isinstance(error, str)
    assert "c10d::allreduce_ of a tensor on the CPU" in error
    error = traced["functional sum on the CPU"]
    assert isinstance(error, str)
    assert "_c10d_functional::all_reduce of a tensor on the CPU" in error
    spoiled = traced["reduction in 16 bits"]
    assert not isinstance(spoiled, str), spoiled
    (problem,) = spoiled["problems"]
    assert "gradients in torch.bfloat16" in problem
    assert "the planner counts 4 bytes each" in problem


@pytest.mark.slow
@pytest.mark.parametrize("fault", MISMATCHES)
def test_ranks_that_exchange_different_things_are_found(
    fault: str, traced: dict[str, Traced]
) -> None:
    spoiled = traced[fault]
    assert not isinstance(spoiled, str), spoiled
    (problem,) = spoiled["problems"]
    assert MISMATCHES[fault] in problem


def test_what_ranks_exchange_is_compared_in_order() -> None:
    def exchanged(operation: str, count: int, ranks: tuple[int, ...] = (0, 1)) -> Collective:
        return Collective(operation, ranks, count, torch.bfloat16, "place")

    right = {
        0: [exchanged("send", 8), exchanged("allreduce", 4), exchanged("alltoall_base", 3)],
        1: [exchanged("recv", 8), exchanged("allreduce", 4), exchanged("alltoall_base", 5)],
    }
    assert mismatches(right) == []
    # The sender's peer does not receive; it takes part in other collectives, in another order.
    assert mismatches({**right, 1: right[1][1:]}) == [
        "exchange 1: rank 0 sends 8 bfloat16, rank 1 receives nothing"
    ]
    assert mismatches({**right, 1: [right[1][0], *right[1][:0:-1]]}) == [
        "exchange 1: rank 0 allreduce 4 bfloat16, rank 1 alltoall_base bfloat16"
    ]
    # Other groups are nothing to them.
    assert mismatches({**right, 2: [exchanged("allreduce", 9, (2, 3))]}) == []


# What a fault adds to the page's table, and what it takes away.
CHANGES = {
    "item in the loop": (["| waits | 2 x item, ", "| waits in evaluation | 2 x item, "], []),
    "another group of the same size": (
        ["| allreduce, ranks 0, 3 | 2 float64", "| allreduce, ranks 0, 3 | 1 int64",
         "| allreduce in evaluation, ranks 0, 3 | 3 float64"],
        ["| allreduce, ranks 0, 2 | 2 float64", "| allreduce, ranks 0, 2 | 1 int64",
         "| allreduce in evaluation, ranks 0, 2 | 3 float64"],
    ),
    "no wait in the feed": (
        [], ["| streams | 2 x event.wait, ", "| streams in evaluation | 2 x event.wait, "],
    ),
    "copy that blocks": (
        ["| waits | 2 x copy to the device, ", "| waits in evaluation | 2 x copy to the device, "],
        [],
    ),
    "places on the host": (
        ["| waits | 2 x copy to the device, ", "| waits in evaluation | 2 x copy to the device, "],
        [],
    ),
    "text and objects of each evaluated batch": (
        ["| waits in evaluation | 3 x list, ", "| waits in evaluation | 2 x objects of ranks, "],
        ["| waits in evaluation | 1 x list, "],
    ),
    "item for each evaluated batch": (["| waits in evaluation | 2 x item, "], []),
    "timed throughput": (
        ["| waits | 2 x torch.cuda.synchronize, bigtrain/engine/forward.py:_forward",
         "| waits | 2 x torch.cuda.synchronize, bigtrain/engine/train_engine.py:train_step",
         "| waits in evaluation | 2 x torch.cuda.synchronize, "], [],
    ),
    "read of each matrix": (
        ["| waits | 4 x item, bigtrain/engine/optimizers/muon.py:_orthogonalized"], [],
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", CHANGES)
def test_faults_change_the_table(fault: str, traced: dict[str, Traced]) -> None:
    right, spoiled = traced[FAULTS[fault]], traced[fault]
    assert not isinstance(right, str), right
    assert not isinstance(spoiled, str), spoiled
    case = BY_NAME[FAULTS[fault]]
    before, after = table(case, right).splitlines(), table(case, spoiled).splitlines()
    added = [line for line in after if line not in before]
    gone = [line for line in before if line not in after]
    for lines, expected in zip((added, gone), CHANGES[fault], strict=True):
        assert len(lines) == len(expected), lines
        assert all(line.startswith(text) for line, text in zip(lines, expected, strict=True)), lines
