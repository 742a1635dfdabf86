"""The same numbers as a loop of plain transformers and torch.optim.AdamW in one process.

What `test_matrix.py` has no axis for: offload, trained weights, every n-th layer, architectures.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.cases import RECOMPUTE, Case, PlainRuns
from tests.parity.conftest import ARCHITECTURES, STEPS, each_case

# All cases are trained in the first test's set-up.
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

EVERY_SECOND = {"model": {"gradient_checkpointing": 2}}
CASES = [
    # Of each stage one, of all values one.
    Case(2, "zero2_offload", accumulation=1, slow=False),
    Case(2, "zero3_offload", accumulation=4, sections=RECOMPUTE, slow=False),
    Case(1, "zero2_offload", accumulation=4, sections=RECOMPUTE),
    Case(1, "zero3_offload", accumulation=1),
    Case(2, "zero3", accumulation=1, sections=EVERY_SECOND),
    Case(1, "zero2", accumulation=8),
    *(
        Case(2, engine, model, sections=RECOMPUTE)
        for engine in ("zero1", "zero3")
        for model in ("gpt2", "qwen3_moe")
    ),
]
TRAINED = [Case(2, "zero3", accumulation=1), Case(1, "zero1", accumulation=1)]
"""Begin with the weights of files."""


@pytest.fixture(scope="module")
def runs(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> PlainRuns:
    return PlainRuns(tmp_path_factory.mktemp("zero"), dataset, ARCHITECTURES, CASES)


@each_case(CASES)
def test_equals_plain_training(case: Case, runs: PlainRuns) -> None:
    runs.check(case)


@each_case(TRAINED)
def test_trained_weights_equal_plain_training(
    case: Case, dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("trained")
    PlainRuns(directory, dataset, ARCHITECTURES, [case], from_files=True).check(case)


def test_reference_learns_and_clips(runs: PlainRuns) -> None:
    training = runs.plain(CASES[0])
    assert training.losses[-1] < training.losses[0] - 0.015 * STEPS
    assert min(training.norms) > 0.5
