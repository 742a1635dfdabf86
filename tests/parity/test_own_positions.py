"""Models that number positions in their own way train as one process does that passes each document
separately, or each sample, without positions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.parity.cases import (
    CONCATENATED,
    EPS,
    KEPT_APART,
    RECOMPUTE,
    Case,
    PlainRuns,
    document_config,
)
from tests.parity.conftest import VOCAB_SIZE, each_case

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1800)]

LENGTH, SAMPLES = 48, 4
SPECIAL = {"pad_token_id": 7, "bos_token_id": 0, "eos_token_id": 0, "is_decoder": True}
"""The padding is a token of the data, which RoBERTa does not count."""
MODELS: dict[str, dict[str, Any]] = {
    "roberta": {
        "model_type": "roberta",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": LENGTH + 8,
        "attention_probs_dropout_prob": 0.0,
        "hidden_dropout_prob": 0.0,
        **SPECIAL,
    },
    "bart": {
        "model_type": "bart",
        "vocab_size": VOCAB_SIZE,
        "d_model": 32,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 64,
        "max_position_embeddings": LENGTH,
        "dropout": 0.0,
        "tie_word_embeddings": False,
        **SPECIAL,
    },
    "bloom": {
        "model_type": "bloom",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "n_layer": 2,
        "n_head": 4,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
}
MODELS["mvp"] = MODELS["bart"] | {"model_type": "mvp"}


def own_positions(
    world_size: int,
    engine: str,
    model: str,
    data: str = KEPT_APART,
    more: Mapping[str, Any] = {},
    accumulation: int = 1,
    slow: bool = True,
    **degrees: Any,
) -> Case:
    sections = {"data": {"path": data}, **EPS, **more}
    return Case(world_size, engine, model, accumulation, degrees, sections, "float32", slow)


CASES = [
    own_positions(2, "zero2", "roberta", more=RECOMPUTE, accumulation=2),
    own_positions(2, "zero3", "roberta", sequence=2, slow=False),
    own_positions(2, "zero1", "roberta", sequence={"ulysses": 1, "ring": 2}),
    own_positions(2, "zero1", "roberta", sequence=2, data=CONCATENATED, slow=False),
    own_positions(2, "zero1", "roberta", pipeline=2, accumulation=2, slow=False),
    own_positions(2, "zero2", "bart", more=RECOMPUTE, accumulation=2, slow=False),
    own_positions(2, "zero3", "bart", sequence=2),
    own_positions(2, "zero1", "bart", sequence={"ulysses": 1, "ring": 2}),
    own_positions(2, "zero1", "bart", pipeline=2, accumulation=2),
    own_positions(2, "zero3", "mvp", more=RECOMPUTE),
    own_positions(2, "zero1", "mvp", pipeline=2, accumulation=2, slow=False),
    own_positions(2, "zero2", "bloom", more=RECOMPUTE),
    own_positions(2, "zero1", "bloom", pipeline=2, accumulation=2),
]


@pytest.fixture(scope="module")
def runs(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> PlainRuns:
    def config_of(case: Case, model: Mapping[str, Any]) -> dict[str, Any]:
        return document_config(case, model, dataset, num_samples=SAMPLES, num_tokens=LENGTH)

    directory = tmp_path_factory.mktemp("own_positions")
    return PlainRuns(directory, dataset, MODELS, CASES, config_of=config_of)


@each_case(CASES)
def test_equals_plain_training(case: Case, runs: PlainRuns) -> None:
    runs.check(case)
