"""Samples split around a ring, or over Ulysses and a ring, train as in one process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bigtrain.models.build import build_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.settings.run_config import ModelSection
from tests.parity.conftest import (
    SEED,
    STEPS,
    VOCAB_SIZE,
    TrainedCases,
    each_case,
    llama,
    run_config,
    train_cases,
)
from tests.parity.plain import Training, plain_training
from tests.parity.test_zero_stages import LOSS, NORM
from tests.support.comparison import assert_same_steps, assert_same_weights
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
MODELS: dict[str, dict[str, Any]] = {
    "llama": llama(),
    "qwen3": llama(model_type="qwen3", head_dim=8),
    "gemma3": llama(
        model_type="gemma3_text",
        head_dim=8,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=10,
        pad_token_id=0,
    ),
    "gpt_oss": OF_EXPERTS
    | {
        "model_type": "gpt_oss",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 10,
        "pad_token_id": 0,
    },
    "mixtral": OF_EXPERTS | {"model_type": "mixtral"},
}


@dataclass(frozen=True)
class Case:
    """One point. data: "concatenated", "isolated" documents, or "chat": isolated, and only some
    tokens are learned."""

    ulysses: int
    ring: int
    engine: str
    architecture: str
    data: str
    tensor: int = 1
    data_size: int = 1
    slow: bool = True
    gradient_checkpointing: str = "none"
    accumulation: int = 1
    expert: int = 1
    dtype: str = "float32"
    loss: str = "auto"

    @property
    def world_size(self) -> int:
        return self.ulysses * self.ring * self.tensor * self.data_size

    @property
    def name(self) -> str:
        recompute = "" if self.gradient_checkpointing == "none" else "-recompute"
        expert = "" if self.expert == 1 else f"-expert{self.expert}"
        return (
            f"ulysses{self.ulysses}-ring{self.ring}-tensor{self.tensor}-dp{self.data_size}-"
            f"{self.engine}-{self.architecture}-{self.data}{recompute}{expert}-{self.dtype}-{self.loss}"
        )

    def config(self, datasets: dict[str, Path]) -> dict[str, Any]:
        micro_batch_size = SAMPLES // (self.data_size * self.accumulation)
        config = plain_config(self.architecture, self.data, datasets)
        config["batch"]["micro_batch_size"] = micro_batch_size
        config["model"]["gradient_checkpointing"] = self.gradient_checkpointing
        config["parallel"] = {
            "sequence": {"ulysses": self.ulysses, "ring": self.ring},
            "tensor": self.tensor,
            "expert": self.expert,
        }
        config["precision"] = {"dtype": self.dtype}
        config["model"] |= {"loss": self.loss, "loss_chunk_tokens": 5}
        return config


def plain_config(architecture: str, data: str, datasets: dict[str, Path]) -> dict[str, Any]:
    config: dict[str, Any] = run_config(
        datasets[data],
        {"config": MODELS[architecture]},
        micro_batch_size=SAMPLES,
        batch={
            "sequence_length": LENGTH,
            "global_batch_size": SAMPLES,
            "micro_batch_size": SAMPLES,
        },
        optimizer={"lr": 3e-3, "clip_norm": 0.5, "eps": 1e-6},  # see test_pipeline.optimizer_of
    )
    if data != "concatenated":
        config["data"] = {"path": str(datasets[data]), "document_boundaries": "isolate"}
    return config


# Every pair of kind, architecture, data, ZeRO stage and tensor-parallel size is in one case.
# gpt-oss has no tensor-parallel plan.
CASES = [
    Case(1, 2, "zero1", "llama", "concatenated", slow=False),
    Case(1, 2, "zero3", "gemma3", "isolated", slow=False),
    Case(1, 2, "zero1", "gpt_oss", "chat"),
    Case(1, 3, "zero3", "llama", "chat"),
    Case(1, 3, "zero1", "qwen3", "isolated"),
    Case(1, 3, "zero3", "gpt_oss", "concatenated"),
    Case(1, 3, "zero1", "gemma3", "chat"),
    Case(1, 3, "zero3", "mixtral", "isolated"),
    Case(1, 4, "zero3", "llama", "isolated"),
    Case(1, 4, "zero1", "gemma3", "concatenated"),
    Case(1, 4, "zero3", "gpt_oss", "isolated"),
    Case(1, 4, "zero1", "mixtral", "chat"),
    Case(1, 4, "zero3", "qwen3", "concatenated", gradient_checkpointing="full"),
    Case(2, 2, "zero1", "llama", "isolated"),
    Case(2, 2, "zero3", "qwen3", "chat"),
    Case(2, 2, "zero3", "gemma3", "isolated", gradient_checkpointing="full"),
    Case(2, 2, "zero1", "gpt_oss", "concatenated"),
    Case(2, 2, "zero3", "mixtral", "concatenated", accumulation=2),
    Case(1, 2, "zero1", "qwen3", "isolated", data_size=2),
    Case(1, 2, "zero3", "mixtral", "chat", data_size=2, accumulation=2),
    Case(1, 2, "zero3", "llama", "chat", tensor=2),
    Case(1, 2, "zero1", "qwen3", "concatenated", tensor=2),
    Case(1, 2, "zero1", "gemma3", "isolated", tensor=2),
    Case(1, 2, "zero3", "gpt_oss", "isolated", data_size=2),
    Case(1, 2, "zero1", "mixtral", "isolated", tensor=2),
    Case(2, 1, "zero3", "llama", "isolated", tensor=2),
    Case(2, 2, "zero1", "qwen3", "isolated", tensor=2),
    Case(1, 3, "zero1", "mixtral", "concatenated", tensor=2),
    Case(1, 4, "zero3", "llama", "chat", tensor=2),
    Case(4, 1, "zero3", "qwen3", "chat"),
    Case(1, 2, "zero1", "mixtral", "isolated", expert=2),
    Case(2, 2, "zero3", "mixtral", "chat", expert=4),
    Case(1, 2, "zero1", "qwen3", "isolated", dtype="bfloat16"),
    Case(2, 2, "zero3", "llama", "chat", loss="chunked"),
    Case(2, 1, "zero3", "gpt_oss", "chat", data_size=2),
    Case(4, 1, "zero1", "gpt_oss", "isolated"),
]


@pytest.fixture(scope="module")
def datasets(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    chat = tmp_path_factory.mktemp("chat") / "shards"
    write_dataset(chat, vocab_size=VOCAB_SIZE, masked=True)
    return {"concatenated": dataset, "isolated": dataset, "chat": chat}


@pytest.fixture(scope="module")
def reference(datasets: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The plain loop's training of an architecture on some data, from bigtrain's initial weights;
    documents are isolated by a forward pass for each."""
    made: dict[tuple[str, str], Training] = {}
    directory = tmp_path_factory.mktemp("hf")

    def of(case: Case) -> Training:
        key = (case.architecture, case.data)
        if key not in made:
            place = directory / case.architecture
            if not place.exists():
                section = ModelSection(config=MODELS[case.architecture])
                build_model(section, load_hf_config(section), seed=SEED).save_pretrained(place)
            made[key] = plain_training(datasets[case.data], place, plain_config(*key, datasets))
        return made[key]

    return of


@pytest.fixture(scope="module")
def trained(
    datasets: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> TrainedCases[Case]:
    return TrainedCases(tmp_path_factory.mktemp("ring"), CASES, lambda case: case.config(datasets))


@each_case(CASES)
def test_equals_plain_training(case: Case, reference: Any, trained: TrainedCases[Case]) -> None:
    result, place = trained.of(case)
    expected = reference(case)
    assert_same_steps(result, expected, loss=LOSS[case.dtype], norm=NORM[case.dtype])
    if case.dtype == "float32":
        assert_same_weights(place, expected.weights, limit=1e-5)


@pytest.mark.slow
def test_resumes_across_kinds(reference: Any, datasets: dict[str, Path], tmp_path: Path) -> None:
    """Written by a ring, continued by Ulysses, then by both, and by one process: the weights at the
    end are the plain ones."""
    cases = [
        Case(1, 3, "zero1", "qwen3", "isolated"),
        Case(2, 1, "zero3", "qwen3", "isolated"),
        Case(2, 2, "zero1", "qwen3", "isolated"),
        Case(1, 1, "zero0", "qwen3", "isolated"),
    ]
    stops = [0, STEPS // 4, STEPS // 2, 3 * STEPS // 4, STEPS]
    losses: list[float] = []
    for number, case in enumerate(cases):
        first, last = stops[number], stops[number + 1]
        steps: dict[str, Any] = {"first_step": first, "last_step": last, "save_at": last}
        steps["save_to"] = str(tmp_path / str(last))
        if first:
            steps["restore_from"] = str(tmp_path / str(first))
        run = {"config": case.config(datasets), "deepspeed_config": case.engine, **steps}
        place = tmp_path / f"part{number}"
        place.mkdir()
        losses += train_cases(case.world_size, {"run": run}, place)["run"]["losses"]
    expected = reference(cases[0])
    assert losses == pytest.approx(expected.losses, abs=1e-5)
    assert_same_weights(tmp_path / str(STEPS), expected.weights, limit=1e-5)
