"""Samples split around a ring, or over Ulysses and a ring, train as in one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.parity.cases import (
    CHUNKS,
    CONCATENATED,
    EPS,
    KEPT_APART,
    RECOMPUTE,
    Case,
    PlainRuns,
    document_config,
)
from tests.parity.conftest import VOCAB_SIZE, each_case, llama
from tests.support.datasets import write_dataset

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1800)]

LENGTH, SAMPLES = 48, 4
"""Tokens that rings of 2, 3 and 4 divide into two chunks for each rank."""

OF_EXPERTS = {name: value for name, value in llama().items() if name != "tie_word_embeddings"} | {
    "num_hidden_layers": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 8,
}
_WINDOWED = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 10,
    "pad_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": llama(),
    "qwen3": llama(model_type="qwen3", head_dim=8),
    "gemma3": llama(model_type="gemma3_text", head_dim=8, num_hidden_layers=2, **_WINDOWED),
    "gpt_oss": OF_EXPERTS | {"model_type": "gpt_oss", **_WINDOWED},
    "mixtral": OF_EXPERTS | {"model_type": "mixtral"},
}
CHAT = "chat"
"""Data: documents that are kept apart, and of which only some tokens are learned."""


def ring(
    ulysses: int,
    ring_size: int,
    engine: str,
    model: str,
    data: str,
    dtype: str = "float32",
    slow: bool = True,
    more: Mapping[str, Any] = {},
    replicas: int = 1,
    **degrees: int,
) -> Case:
    world_size = ulysses * ring_size * replicas * degrees.get("tensor", 1)
    sequence = {"sequence": {"ulysses": ulysses, "ring": ring_size}}
    sections = {"data": {"path": data}, **EPS, **more}
    return Case(world_size, engine, model, 1, sequence | degrees, sections, dtype, slow)


# Every kind, architecture, data, ZeRO stage and tensor-parallel size with most of the others.
# gpt-oss has no tensor-parallel plan.
CASES = [
    ring(1, 2, "zero1", "llama", CONCATENATED, slow=False),
    ring(1, 2, "zero3", "gemma3", KEPT_APART, slow=False),
    ring(1, 2, "zero1", "gpt_oss", CHAT),
    ring(1, 3, "zero3", "llama", CHAT),
    ring(1, 3, "zero1", "mixtral", CONCATENATED, tensor=2),
    ring(1, 4, "zero1", "gemma3", CONCATENATED),
    ring(1, 4, "zero3", "qwen3", KEPT_APART, more=RECOMPUTE),
    ring(2, 2, "zero1", "gpt_oss", KEPT_APART),
    ring(2, 2, "zero3", "llama", CHAT, more=CHUNKS),
    ring(2, 2, "zero1", "qwen3", CONCATENATED, tensor=2),
    ring(1, 2, "zero3", "mixtral", CHAT, replicas=2),
    ring(1, 2, "zero1", "gemma3", KEPT_APART, tensor=2),
    ring(1, 2, "zero1", "mixtral", KEPT_APART, expert=2),
    ring(2, 2, "zero3", "mixtral", CHAT, expert=4),
    ring(4, 1, "zero3", "qwen3", CHAT),
    ring(2, 1, "zero3", "gpt_oss", CHAT, replicas=2),
    ring(1, 2, "zero1", "qwen3", KEPT_APART, "bfloat16"),
]


@pytest.fixture(scope="module")
def runs(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> PlainRuns:
    chat = write_dataset(
        tmp_path_factory.mktemp("chat") / "shards", vocab_size=VOCAB_SIZE, masked=True
    )

    def config_of(case: Case, model: Mapping[str, Any]) -> dict[str, Any]:
        data = chat if case.sections["data"]["path"] == CHAT else dataset
        return document_config(case, model, data, num_samples=SAMPLES, num_tokens=LENGTH)

    directory = tmp_path_factory.mktemp("ring")
    return PlainRuns(directory, dataset, MODELS, CASES, config_of=config_of)


@each_case(CASES)
def test_equals_plain_training(case: Case, runs: PlainRuns) -> None:
    runs.check(case)
