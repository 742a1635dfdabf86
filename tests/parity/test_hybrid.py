"""Models of attention and recurrent layers train as one process does that passes each document
separately: in samples that documents share, divided among ranks, in stages, recomputed. What they
have learned is loaded by transformers from an exported directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bigtrain.data.tokenizers.training import train_tokenizer
from bigtrain.engine.checkpoint.io import read_full_masters
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.export.verified import Destination, Probe, export_model
from bigtrain.settings.run_config import ModelSection
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
from tests.parity.hybrid_models import MODELS

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1800)]

LENGTH, SAMPLES = 48, 4


def hybrid(
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


RING = {"ulysses": 1, "ring": 2}
# Every kind of layer, stage of ZeRO and degree with others.
CASES = [
    hybrid(2, "zero0", "qwen3_5", more=RECOMPUTE, accumulation=2),
    hybrid(2, "zero2", "bamba", more=RECOMPUTE),
    hybrid(2, "zero3", "jamba", more=RECOMPUTE, slow=False),
    hybrid(2, "zero1", "lfm2"),
    hybrid(2, "zero3", "xlstm", accumulation=2),
    hybrid(2, "zero1", "qwen3_5", pipeline=2, more=RECOMPUTE, accumulation=2),
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
    hybrid(2, "zero1", "falcon_h1", tensor=2),
    # The rule of the model for initial weights reaches into every layer.
    hybrid(2, "zero1", "falcon_h1", pipeline=2, accumulation=2),
    hybrid(2, "zero3", "qwen3_next", tensor=2),
    hybrid(2, "zero1", "granitemoehybrid", tensor=2),
    hybrid(2, "zero3", "nemotron_h", tensor=2),
    hybrid(2, "zero1", "olmo_hybrid", tensor=2),
    hybrid(2, "zero3", "mamba2", tensor=2),
    hybrid(2, "zero1", "zamba2", tensor=2),
]
# Of each model the first case under ZeRO 3 or with divided tensors; of three models a fast one.
_EXPORTABLE = [
    case
    for case in CASES
    if (case.engine == "zero3" or "tensor" in case.degrees)
    and case.model != "xlstm"  # which transformers 5.23 cannot evaluate at these widths
]
EXPORTED = list(
    {case.model: case for case in sorted(_EXPORTABLE, key=lambda c: not c.slow)}.values()
)


@pytest.fixture(scope="module")
def runs(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> PlainRuns:
    def config_of(case: Case, model: Mapping[str, Any]) -> dict[str, Any]:
        return document_config(case, model, dataset, num_samples=SAMPLES, num_tokens=LENGTH)

    directory = tmp_path_factory.mktemp("hybrid")
    return PlainRuns(directory, dataset, MODELS, CASES, config_of=config_of)


@each_case(CASES)
def test_equals_plain_training(case: Case, runs: PlainRuns) -> None:
    runs.check(case)


@each_case(EXPORTED)
def test_its_export_is_loaded_by_transformers(case: Case, runs: PlainRuns, tmp_path: Path) -> None:
    """With the logits of the trained weights to the last bit."""
    _, place = runs.trained(case)
    weights = read_full_masters(place / "tensors")
    model = AutoModelForCausalLM.from_pretrained(runs.directories[case.model], dtype=torch.float32)
    ids = Probe.make_input(VOCAB_SIZE, LENGTH)
    with torch.no_grad():
        untrained_logits = model.eval()(input_ids=ids).logits
        different_keys = model.load_state_dict(weights, strict=False)
        logits = model(input_ids=ids).logits
    assert different_keys.unexpected_keys == []
    assert not torch.allclose(logits, untrained_logits, atol=1e-3)

    tokenizer = tmp_path / "tokenizer"
    train_tokenizer(iter([["the theme of the thesis"]]), 260).save(tokenizer)
    hf_config = load_hf_config(ModelSection(config=MODELS[case.model]))
    destination = Destination(tmp_path / "hf", tokenizer, "float32")
    export_model(weights, hf_config, destination, probe=Probe(ids, logits, "float32"))
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(input_ids=ids).logits, logits)
