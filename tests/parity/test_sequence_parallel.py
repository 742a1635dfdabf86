"""Samples split over processes along the sequence train as one process trains whole ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.cases import EPS, ISOLATED, RECOMPUTE, Case, PlainRuns
from tests.parity.conftest import ARCHITECTURES, each_case, llama

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

WINDOWED = llama(model_type="mistral", sliding_window=5, tie_word_embeddings=False)
ONE_KEY_HEAD = llama(num_key_value_heads=1)
MODELS = {**ARCHITECTURES, "mistral": WINDOWED, "one_key_head": ONE_KEY_HEAD}
SEQUENCE = {"sequence": 2}
BOTH = {"sequence": 2, "tensor": 2}
# Llama alone is in `test_matrix.py`.
CASES = [
    Case(2, "zero3", "qwen3_moe", 1, SEQUENCE, slow=False),
    # DeepSpeed makes its groups once in a process: one such case of a world.
    Case(4, "zero3_hpz", accumulation=1, degrees=SEQUENCE),
    Case(2, "zero3_offload", accumulation=1, degrees=SEQUENCE),
    Case(2, "zero1", "gpt2", 1, SEQUENCE, EPS),
    Case(2, "zero3", "gpt2", 1, SEQUENCE, ISOLATED),
    Case(2, "zero1", "mistral", 1, SEQUENCE),
    Case(4, "zero3", "one_key_head", 1, BOTH),
    Case(4, "zero0", "mistral", 1, BOTH),
    Case(4, "zero1", "one_key_head", 1, {"sequence": 4}),
    Case(4, "zero2_offload", "llama", 4, SEQUENCE, RECOMPUTE),
    Case(4, "zero0", "llama", 1, {"sequence": 4}, dtype="bfloat16"),
]


@pytest.fixture(scope="module")
def runs(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> PlainRuns:
    return PlainRuns(tmp_path_factory.mktemp("sequence"), dataset, MODELS, CASES)


@each_case(CASES)
def test_equals_plain_training(case: Case, runs: PlainRuns) -> None:
    result, _ = runs.check(case)
    assert result["secondary_size"] == (2 if case.engine == "zero3_hpz" else None)
