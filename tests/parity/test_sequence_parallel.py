"""Samples split over processes along the sequence train as one process trains whole ones."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from bigtrain.engine.checkpoint.io import read_full
from tests.parity.conftest import (
    ARCHITECTURES,
    STEPS,
    References,
    SavedModels,
    TrainedCases,
    each_case,
    llama,
    run_config,
    train_cases,
)
from tests.parity.plain import plain_training
from tests.parity.test_isolation import config_for
from tests.parity.test_zero_stages import LOSS, NORM
from tests.support.comparison import assert_same_steps
from tests.support.worlds import ROOT

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

WINDOWED = llama(model_type="mistral", sliding_window=5, tie_word_embeddings=False)
ONE_KEY_HEAD = llama(num_key_value_heads=1)
MODELS = {**ARCHITECTURES, "mistral": WINDOWED, "one_key_head": ONE_KEY_HEAD}


@dataclass(frozen=True)
class Case:
    """One point: 8 samples of 16 tokens, divided among `world_size` processes."""

    world_size: int
    sequence: int
    engine: str
    accumulation: int = 1
    architecture: str = "llama"
    gradient_checkpointing: str = "none"
    dtype: str = "float32"
    tensor: int = 1
    slow: bool = False

    @property
    def name(self) -> str:
        return (
            f"sequence{self.sequence}-tensor{self.tensor}-of{self.world_size}-{self.engine}-"
            f"accumulation{self.accumulation}-{self.gradient_checkpointing}-{self.architecture}-"
            f"{self.dtype}"
        )

    def config(self, data: Path) -> dict[str, Any]:
        data_size = self.world_size // (self.sequence * self.tensor)
        config: dict[str, Any] = run_config(
            data,
            {
                "config": MODELS[self.architecture],
                "gradient_checkpointing": self.gradient_checkpointing,
            },
            micro_batch_size=8 // (data_size * self.accumulation),
            parallel={"sequence": self.sequence, "tensor": self.tensor},
            precision={"dtype": self.dtype},
        )
        return config


# Llama alone is in `test_matrix.py`.
CASES = [
    Case(2, 2, "zero3_offload", slow=True),
    Case(2, 2, "zero1", architecture="gpt2", slow=True),
    Case(2, 2, "zero3", architecture="qwen3_moe"),
    Case(2, 2, "zero1", architecture="mistral", slow=True),
    Case(4, 2, "zero1", 2, architecture="one_key_head", slow=True),
    Case(4, 2, "zero3", architecture="one_key_head", tensor=2, slow=True),
    # DeepSpeed makes its groups once in a process: one such case of a world.
    Case(4, 2, "zero3_hpz"),
    Case(4, 2, "zero3_hpz", 2, slow=True),
    Case(4, 2, "zero0", architecture="mistral", tensor=2, slow=True),
    Case(4, 4, "zero1", architecture="one_key_head", slow=True),
    Case(4, 4, "zero3", architecture="mistral", slow=True),
    Case(4, 2, "zero2_offload", 4, gradient_checkpointing="full", slow=True),
    Case(4, 4, "zero0", dtype="bfloat16", slow=True),
]


@pytest.fixture(scope="module")
def references(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> References:
    """The plain loop's figures by architecture; each is trained from bigtrain's initial weights."""
    return References(dataset, SavedModels(MODELS, tmp_path_factory.mktemp("hf")))


def engine_file(name: str, directory: Path) -> str:
    """What a run would name: a file of ds_configs/, or ZeRO 3 with secondary partitions of two."""
    if name != "zero3_hpz":
        return name
    engine = json.loads((ROOT / "ds_configs/zero3.json").read_text())
    engine["zero_optimization"]["zero_hpz_partition_size"] = 2
    file = directory / f"{name}.json"
    file.write_text(json.dumps(engine))
    return str(file)


@pytest.fixture(scope="module")
def trained(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainedCases[Case]:
    directory = tmp_path_factory.mktemp("sequence")
    return TrainedCases(
        directory,
        CASES,
        lambda case: case.config(dataset),
        lambda case: {"deepspeed_config": engine_file(case.engine, directory)},
    )


@each_case(CASES)
def test_equals_plain_training(
    case: Case, references: References, trained: TrainedCases[Case]
) -> None:
    reference, (result, _) = references[case.architecture], trained.of(case)
    assert result["accumulation"] == case.accumulation
    assert result["secondary_size"] == (2 if case.engine == "zero3_hpz" else None)
    assert_same_steps(result, reference, loss=LOSS[case.dtype], norm=NORM[case.dtype])


FIRST_STOP, SECOND_STOP = STEPS // 4, STEPS // 2


def test_checkpoints_do_not_know_of_it(
    dataset: Path, references: References, tmp_path: Path
) -> None:
    """Written by two processes that share samples, read by one that has them whole, and back."""
    split, whole = Case(2, 2, "zero1"), Case(1, 1, "zero0")
    results = []
    for number, (case, first, last) in enumerate(
        [(split, 0, FIRST_STOP), (whole, FIRST_STOP, SECOND_STOP), (split, SECOND_STOP, STEPS)]
    ):
        steps: dict[str, Any] = {"first_step": first, "last_step": last}
        if last < STEPS:
            steps |= {"save_at": last, "save_to": str(tmp_path / str(last))}
        if first:
            steps["restore_from"] = str(tmp_path / str(first))
            steps["save_again_to"] = str(tmp_path / f"{first} again")
        run = {"config": case.config(dataset), "deepspeed_config": case.engine, **steps}
        place = tmp_path / f"part{number}"
        place.mkdir()
        results.append(train_cases(case.world_size, {"run": run}, place)["run"])
    for key in ("losses", "norms"):
        values = [value for result in results for value in result[key]]
        assert values == pytest.approx(getattr(references["llama"], key), abs=1e-5, rel=1e-4)
    for step in (FIRST_STOP, SECOND_STOP):
        saved = read_full(tmp_path / str(step) / "tensors")
        again = read_full(tmp_path / f"{step} again" / "tensors")
        assert saved.keys() == again.keys()
        assert all(torch.equal(tensor, again[key]) for key, tensor in saved.items())


@pytest.mark.slow
def test_isolated_documents_equal_separate_ones(
    dataset: Path, hf_directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    cases = {
        f"{architecture}-{engine}": {
            "config": {
                **config_for(dataset, {"config": ARCHITECTURES[architecture]}, 6),
                "parallel": {"sequence": 2},
            },
            "deepspeed_config": engine,
            "last_step": 4,
        }
        for architecture, engine in (("gpt2", "zero3"),)
    }
    results = train_cases(2, cases, tmp_path_factory.mktemp("isolated"))
    for name, result in results.items():
        directory = hf_directories[name.split("-")[0]]
        expected = plain_training(dataset, directory, cases[name]["config"], num_steps=4)
        assert_same_steps(result, expected, loss=1e-5, norm=1e-4)
