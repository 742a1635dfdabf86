"""The parity matrix: each world size trains all of its cases in one process group."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.datasets import write_dataset
from tests.support.worlds import run_world

VOCAB_SIZE = 97
STEPS = 20
WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True)
class Case:
    """One point of the matrix."""

    world_size: int
    deepspeed_config: str
    accumulation: int
    gradient_checkpointing: str | int

    @property
    def name(self) -> str:
        return (
            f"{self.deepspeed_config}-world{self.world_size}-accumulation{self.accumulation}-"
            f"checkpointing_{self.gradient_checkpointing}"
        )


def matrix() -> list[Case]:
    """Every ZeRO stage and offload x 1, 2 processes x accumulation 1, 4 x checkpointing."""
    configs = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
    return [
        Case(world_size, config, accumulation, checkpointing)
        for world_size in (1, 2)
        for config in configs
        for accumulation in (1, 4)
        for checkpointing in ("none", "full")
    ] + [Case(2, "zero3", 1, 2)]


def run_config(data: Path, model: dict[str, Any], *, micro_samples: int, **sections: Any) -> Any:
    """A run of 20 steps of 8 samples of 16 tokens, with clipping that bites."""
    return {
        "model": model,
        "data": {"path": str(data), "mask_end_of_document": True},
        "batch": {"sequence_length": 16, "global_samples": 8, "micro_samples": micro_samples},
        "train": {"steps": STEPS},
        "optimizer": {"lr": 3e-3, "clip_norm": 0.5},
        "schedule": {"type": "cosine", "warmup_steps": 4},
        "precision": {"dtype": "float32"},
        "output": {"directory": "unused"},
        "seed": 7,
        **sections,
    }


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "shards", vocab_size=VOCAB_SIZE)


def llama(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        **changes,
    }


@pytest.fixture(scope="session")
def results(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Losses and gradient norms of every case of the matrix, by name."""
    found: dict[str, Any] = {}
    for world_size in (1, 2):
        cases = {}
        for case in matrix():
            if case.world_size != world_size:
                continue
            model = {"config": llama(), "gradient_checkpointing": case.gradient_checkpointing}
            micro_samples = 8 // (world_size * case.accumulation)
            cases[case.name] = {
                "config": run_config(dataset, model, micro_samples=micro_samples),
                "deepspeed_config": case.deepspeed_config,
            }
        found.update(train_cases(world_size, cases, tmp_path_factory.mktemp("parity")))
    return found


def train_cases(world_size: int, cases: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Train `cases` in a world of `world_size` processes; results by case name."""
    (directory / "cases.json").write_text(json.dumps(cases))
    output = directory / "results.json"
    run_world(world_size, [str(WORKER), str(directory / "cases.json"), str(output)])
    results: dict[str, Any] = json.loads(output.read_text())
    return results
