"""Models of attention and recurrent layers train as one process does that passes each document
separately: in samples that documents share, divided among ranks, in stages, recomputed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.parity.cases import EPS, RECOMPUTE, Case, PlainRuns
from tests.parity.conftest import VOCAB_SIZE, each_case
from tests.support.hybrids import HYBRIDS

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1800)]

LENGTH, SAMPLES = 48, 4
ISOLATED, CONCATENATED = "isolated", "concatenated"
MODELS: dict[str, dict[str, Any]] = {
    name: HYBRIDS[model_type] | {"vocab_size": VOCAB_SIZE}
    for name, model_type in {
        "qwen3_5": "qwen3_5_text",
        **{name: name for name in ("bamba", "jamba", "lfm2", "kimi_linear", "recurrent_gemma")},
    }.items()
}


def hybrid(
    world_size: int,
    engine: str,
    model: str,
    data: str = ISOLATED,
    more: Mapping[str, Any] = {},
    accumulation: int = 1,
    slow: bool = True,
    **degrees: Any,
) -> Case:
    sections = {"data": {"path": data}, **EPS, **more}
    return Case(world_size, engine, model, accumulation, degrees, sections, "float32", slow)


RING = {"ulysses": 1, "ring": 2}
# Every kind of layer, stage of ZeRO and degree with others.
CASES = [
    hybrid(2, "zero0", "qwen3_5", more=RECOMPUTE, accumulation=2),
    hybrid(2, "zero2", "bamba", more=RECOMPUTE),
    hybrid(2, "zero3", "jamba", more=RECOMPUTE, slow=False),
    hybrid(2, "zero1", "lfm2"),
    hybrid(2, "zero1", "qwen3_5", pipeline=2, more=RECOMPUTE, accumulation=2, slow=False),
    hybrid(2, "zero1", "bamba", pipeline=2, accumulation=2),
    hybrid(2, "zero1", "qwen3_5", tensor=2),
    hybrid(2, "zero3", "qwen3_5", sequence=2, more=RECOMPUTE, slow=False),
    hybrid(2, "zero1", "bamba", sequence=RING),
    hybrid(2, "zero1", "jamba", sequence=2, data=CONCATENATED, more=RECOMPUTE),
    hybrid(2, "zero2", "lfm2", sequence=RING, data=CONCATENATED),
    hybrid(4, "zero1", "bamba", sequence=4),
    hybrid(4, "zero3", "jamba", sequence={"ulysses": 2, "ring": 2}, more=RECOMPUTE),
    hybrid(4, "zero2", "qwen3_5", sequence=2, accumulation=2, more=RECOMPUTE),
    hybrid(4, "zero1", "qwen3_5", sequence=2, tensor=2),
    # Heads of recurrent layers divided: ranks share a group of Mamba 2 and the norm of its heads.
    hybrid(2, "zero0", "bamba", tensor=2, more=RECOMPUTE, accumulation=2),
    hybrid(2, "zero3", "bamba", tensor=2, slow=False),
    hybrid(2, "zero2", "jamba", tensor=2, more=RECOMPUTE),
    hybrid(2, "zero1", "lfm2", tensor=2, data=CONCATENATED),
    hybrid(2, "zero1", "kimi_linear", tensor=2),
    hybrid(2, "zero2", "recurrent_gemma", tensor=2),
    hybrid(2, "zero3", "qwen3_5", tensor=2, more=RECOMPUTE, accumulation=2),
    hybrid(4, "zero3", "bamba", tensor=2),
    hybrid(4, "zero1", "bamba", tensor=4),
    hybrid(4, "zero2", "bamba", tensor=2, sequence=RING),
    hybrid(4, "zero1", "bamba", tensor=2, pipeline=2, accumulation=2),
    hybrid(4, "zero1", "qwen3_5", tensor=2, pipeline=2, accumulation=2),
    hybrid(4, "zero3", "jamba", tensor=2, sequence=2),
]


@pytest.fixture(scope="module")
def runs(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> PlainRuns:
    def config_of(case: Case, model: Mapping[str, Any]) -> dict[str, Any]:
        config = case.config(dataset, model, SAMPLES)
        config["batch"] |= {"sequence_length": LENGTH, "global_batch_size": SAMPLES}
        kind = config["data"]["path"]
        config["data"] = {"path": str(dataset)}
        if kind == CONCATENATED:
            config["data"]["mask_end_of_document"] = True
        else:
            config["data"]["document_boundaries"] = "isolate"
        return config

    directory = tmp_path_factory.mktemp("hybrid")
    return PlainRuns(directory, dataset, MODELS, CASES, config_of=config_of)


@each_case(CASES)
def test_equals_plain_training(case: Case, runs: PlainRuns) -> None:
    runs.check(case)
