"""Optimizer steps on fake CUDA tensors are as on the page, and planted faults are found."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu_proof.__main__ import PAGE, table, trace_apart
from benchmarks.gpu_proof.cases import CASES, NOT_FOLLOWED, Case
from benchmarks.gpu_proof.fake_cuda import why_not

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")

BY_NAME = {case.name: case for case in CASES}
CORE = ("zero 1", "zero 3, tensor 2", "zero 1, experts 2")
FAULTS = ("mask on the CPU", "item in the loop", "reduction in 16 bits")
Traced = dict[str, Any] | str


@pytest.fixture(scope="module")
def traced() -> dict[str, Traced]:
    """What the core cases did by name, and the first of them by the fault planted in it."""
    wanted = [(BY_NAME[name], "") for name in CORE] + [(BY_NAME[CORE[0]], name) for name in FAULTS]
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
    spoiled = traced["item in the loop"]
    assert not isinstance(spoiled, str), spoiled
    page = PAGE.read_text()
    lines = table(BY_NAME[CORE[0]], spoiled).splitlines()
    (new,) = [line for line in lines if line not in page]
    assert new.startswith("| waits | 2 x item, ")
    assert "models/layers/chunked_loss.py:_run_base -> transformers/" in new
    spoiled = traced["reduction in 16 bits"]
    assert not isinstance(spoiled, str), spoiled
    (problem,) = spoiled["problems"]
    assert "gradients in torch.bfloat16" in problem
    assert "the planner counts 4 bytes each" in problem
