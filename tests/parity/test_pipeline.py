"""Pipeline stages train as plain transformers and torch.optim.AdamW do in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parity.cases import EPS, RECOMPUTE, Case, PlainRuns
from tests.parity.conftest import ARCHITECTURES, VOCAB_SIZE, each_case, llama

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

MODELS: dict[str, dict[str, Any]] = {
    "llama": llama(num_hidden_layers=4),
    "gpt2": {**ARCHITECTURES["gpt2"], "n_layer": 4},
    "qwen3_moe": {**ARCHITECTURES["qwen3_moe"], "num_hidden_layers": 4},
    # Keys and values written by one layer and read by later ones, inputs of every layer from ids.
    "gemma3n": llama(
        model_type="gemma3n_text",
        num_hidden_layers=4,
        head_dim=8,
        num_kv_shared_layers=2,
        intermediate_size=[64] * 4,
        activation_sparsity_pattern=[0.0] * 4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=8,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB_SIZE,
        laurel_rank=4,
        pad_token_id=None,
        eos_token_id=None,
        bos_token_id=None,
    ),
    # No biases and no weights in its norms: no parameter that is not to decay, but embeddings.
    "olmo": {
        "model_type": "olmo",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "pad_token_id": None,
    },
}


STAGES = {"pipeline": 2}
FOUR = {"pipeline": 4}
UNCLIPPED: dict[str, dict[str, Any]] = {"optimizer": {**EPS["optimizer"], "clip_norm": 0.0}}
# Embeddings alone are in the group that does not decay, which one stage has not.
OLMO = {"optimizer": {**EPS["optimizer"], "decay_embeddings": False, "weight_decay": 0.0}}
# Llama alone is in `test_matrix.py`.
CASES = [
    Case(2, "zero0", "gemma3n", 2, STAGES, UNCLIPPED | RECOMPUTE, slow=False),
    Case(2, "zero1", "olmo", 2, STAGES, OLMO),
    Case(4, "zero0", "qwen3_moe", 2, STAGES, EPS | RECOMPUTE),
    Case(4, "zero1", "gpt2", 4, FOUR, EPS),
    Case(4, "zero0", "gpt2", 2, FOUR, EPS),
    Case(4, "zero1", "gpt2", 2, STAGES, EPS, "bfloat16"),
    *(Case(4, "zero0", model, 2, FOUR, EPS) for model in ("qwen3_moe", "gemma3n")),
    Case(4, "zero0", "olmo", 2, FOUR, OLMO),
    Case(4, "zero1", "qwen3_moe", 2, {**STAGES, "tensor": 2}, EPS),
    Case(4, "zero1", "qwen3_moe", 2, {**STAGES, "tensor": 2}, EPS, "bfloat16"),
    Case(8, "zero0", "qwen3_moe", 4, {**FOUR, "tensor": 2}, EPS),
]
# DeepSpeed's ZeRO 1 accumulates elsewhere then, and would leave tied weights to part.
OFFLOADED = [
    Case(2, "zero1_offload", "llama", 2, STAGES, EPS, slow=False),
    Case(2, "zero1_offload", "llama", 2, STAGES, EPS, "bfloat16"),
]


@pytest.fixture(scope="module")
def runs(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> PlainRuns:
    directory = tmp_path_factory.mktemp("pipeline")
    return PlainRuns(directory, dataset, MODELS, [*CASES, *OFFLOADED])


@each_case(CASES)
def test_equals_plain_training(case: Case, runs: PlainRuns) -> None:
    runs.check(case)
    if clip_norm := runs.config_of(case)["optimizer"]["clip_norm"]:
        assert min(runs.plain(case).norms) > clip_norm


@each_case(OFFLOADED)
def test_offloaded_optimizer_keeps_ties(case: Case, runs: PlainRuns) -> None:
    runs.check(case)
