"""MLPs computed in tiles of tokens train as plain transformers does, which computes them at once.

Adapters are in `test_adapters.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import pytest

from tests.parity.conftest import (
    SHARED_MOE,
    SavedModels,
    TrainedCases,
    each_case,
    llama,
    run_config,
)
from tests.parity.plain import Training, divided, plain_training
from tests.parity.test_ring import OF_EXPERTS
from tests.support.comparison import assert_same_steps, assert_same_weights

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1800)]

LOSS, NORM, WEIGHTS = 1e-5, 1e-4, 1e-5
AUXILIARY = 0.1
MODELS: dict[str, dict[str, Any]] = {
    "llama": llama(),
    # Two inputs of the MLP, biases and the residual inside.
    "bloom": {
        "model_type": "bloom",
        "vocab_size": 97,
        "hidden_size": 32,
        "n_layer": 2,
        "n_head": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "gpt_oss": OF_EXPERTS
    | {
        "model_type": "gpt_oss",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 10,
        "pad_token_id": 0,
    },
    "mixtral": OF_EXPERTS | {"model_type": "mixtral"},
    # Their router's loss is a mean over the tokens of a micro-batch.
    "balanced": OF_EXPERTS
    | {"model_type": "mixtral", "output_router_logits": True, "router_aux_loss_coef": AUXILIARY},
    "shared_moe": SHARED_MOE,
}


@dataclass(frozen=True)
class Case:
    """One point; `tiles` does not divide the tokens of a micro-batch."""

    engine: str
    architecture: str = "llama"
    degrees: dict[str, int] = field(default_factory=dict)
    data_size: int = 1
    tiles: int = 5
    recompute: str = "none"
    accumulation: int = 2
    loss: str = "auto"
    slow: bool = True

    @property
    def model_size(self) -> int:
        """Ranks that share samples: experts are divided over ranks with other samples."""
        return prod(size for axis, size in self.degrees.items() if axis != "expert")

    @property
    def world_size(self) -> int:
        return self.model_size * self.data_size

    @property
    def name(self) -> str:
        degrees = "-".join(f"{axis}{size}" for axis, size in self.degrees.items())
        recompute = "" if self.recompute == "none" else "-recompute"
        return (
            f"{self.engine}-{self.architecture}-{degrees or 'data'}-dp{self.data_size}"
            f"-tiles{self.tiles}-accumulation{self.accumulation}-{self.loss}{recompute}"
        )

    def config(self, dataset: Path) -> dict[str, Any]:
        model = {
            "config": MODELS[self.architecture],
            "tiled_mlp": self.tiles,
            "gradient_checkpointing": self.recompute,
            "loss": self.loss,
            "loss_chunk_tokens": 5,
        }
        micro_batch_size = 8 // (self.data_size * self.accumulation)
        return plain_config(dataset, model, micro_batch_size, parallel=self.degrees)


def plain_config(
    dataset: Path, model: dict[str, Any], micro_batch_size: int, **sections: Any
) -> dict[str, Any]:
    # With the usual eps AdamW makes large updates from rounding errors: see test_ring.
    optimizer = {"lr": 3e-3, "clip_norm": 0.5, "eps": 1e-6}
    config: dict[str, Any] = run_config(
        dataset, model, micro_batch_size=micro_batch_size, optimizer=optimizer, **sections
    )
    return config


CASES = [
    Case("zero1", data_size=2, slow=False),
    Case("zero3", data_size=2, recompute="full"),
    Case("zero3", "shared_moe", data_size=2),
    Case("zero1", degrees={"tensor": 2}),
    *(Case(engine, data_size=2) for engine in ("zero0", "zero2", "zero3", "zero3_offload")),
    *(Case(engine, "bloom", data_size=2) for engine in ("zero0", "zero3")),
    Case("zero1", tiles=1),
    Case("zero1", tiles=32, accumulation=4),
    Case("zero3", degrees={"tensor": 2}, recompute="full"),
    Case("zero3", degrees={"sequence": 2}, data_size=2),
    Case("zero1", degrees={"sequence": 2}, recompute="full"),
    Case("zero3", degrees={"tensor": 2, "sequence": 2}, loss="chunked"),
    Case("pipeline_zero1", degrees={"pipeline": 2}, recompute="full"),
    *(Case(engine, "gpt_oss", data_size=2) for engine in ("zero0", "zero1", "zero3")),
    Case("zero1", "mixtral", degrees={"tensor": 2}),
    Case("zero3", "mixtral", data_size=2, recompute="full"),
    Case("zero1", "balanced", data_size=2),
    Case("zero3", "balanced", data_size=2, recompute="full"),
    Case("zero1", "mixtral", degrees={"expert": 2}, data_size=2),
    Case("zero3", "mixtral", degrees={"expert": 2}, data_size=2, recompute="full"),
    Case("zero1", "mixtral", degrees={"expert": 2, "tensor": 2}, data_size=2),
    Case("zero3", "shared_moe", degrees={"tensor": 2}),
]


@pytest.fixture(scope="module")
def reference(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The plain loop's training of an architecture from bigtrain's initial weights."""
    saved = SavedModels(MODELS, tmp_path_factory.mktemp("hf"))
    made: dict[str, Training] = {}

    def of(architecture: str) -> Training:
        if architecture not in made:
            config = plain_config(dataset, {}, 8)
            router: dict[str, Any] = {}
            if architecture == "balanced":  # its cases have micro-batches of 2 samples
                router = {"aux_coefficient": AUXILIARY, "chunks": divided(2)}
            made[architecture] = plain_training(dataset, saved[architecture], config, **router)
        return made[architecture]

    return of


@pytest.fixture(scope="module")
def trained(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainedCases[Case]:
    directory = tmp_path_factory.mktemp("tiled_mlp")
    return TrainedCases(directory, CASES, lambda case: case.config(dataset))


@each_case(CASES)
def test_equals_plain_training(case: Case, reference: Any, trained: TrainedCases[Case]) -> None:
    result, place = trained.of(case)
    expected = reference(case.architecture)
    assert_same_steps(result, expected, loss=LOSS, norm=NORM)
    bias = "e_score_correction_bias"
    assert_same_weights(place, expected.weights, limit=WEIGHTS, buffers=bias)
