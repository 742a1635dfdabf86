"""Pipeline stages train as plain transformers and torch.optim.AdamW do in one process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bigtrain.engine.checkpoint.io import read_full_masters
from bigtrain.models.build import build_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.settings.run_config import ModelSection
from tests.parity.conftest import ARCHITECTURES, SEED, STEPS, VOCAB_SIZE, llama, run_config
from tests.parity.conftest import train_cases as train
from tests.parity.plain import Training, plain_training
from tests.parity.test_zero_stages import LOSS, NORM
from tests.support.comparison import assert_same_steps, assert_same_tensors

# Worlds of up to four processes train in the first test's set-up: minutes on two busy cores.
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

WEIGHTS = 1e-5
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


@dataclass(frozen=True)
class Case:
    """A run in stages."""

    world_size: int
    stages: int
    engine: str
    accumulation: int
    model: str
    checkpointing: str = "none"
    dtype: str = "float32"
    clip_norm: float = 0.5
    tensor: int = 1

    @property
    def data(self) -> int:
        return self.world_size // (self.stages * self.tensor)

    @property
    def name(self) -> str:
        return (
            f"{self.model}-pp{self.stages}-tp{self.tensor}-dp{self.data}-{self.engine}-"
            f"accumulation{self.accumulation}-{self.checkpointing}-{self.dtype}"
            f"{'' if self.clip_norm else '-unclipped'}"
        )


# Llama alone is in `test_matrix.py`.
COVERING = [
    Case(2, 2, "zero0", 2, "gemma3n", "full", clip_norm=0.0),
    Case(2, 2, "zero1", 2, "olmo"),
]
ALL = [
    Case(2, 2, "zero0", 2, "qwen3_moe", "full"),
    Case(4, 4, "zero1", 4, "gpt2"),
    Case(4, 2, "zero0", 2, "qwen3_moe", "full"),
    *(
        Case(4, stages, engine, 2, "gpt2", dtype=dtype)
        for stages in (2, 4)
        for engine, dtype in (("zero0", "float32"), ("zero1", "float32"), ("zero1", "bfloat16"))
    ),
]
ALL += [Case(4, 4, "zero0", 2, model) for model in ("qwen3_moe", "gemma3n", "olmo")]
ALL += [
    Case(4, 2, engine, 2, "qwen3_moe", dtype=dtype, tensor=2)
    for engine, dtype in (("zero0", "float32"), ("zero1", "float32"), ("zero1", "bfloat16"))
]
ALL += [Case(8, 4, "zero0", 4, "qwen3_moe", tensor=2)]


def config_of(case: Case, data: Path) -> dict[str, Any]:
    config: dict[str, Any] = run_config(
        data,
        {"config": MODELS[case.model], "gradient_checkpointing": case.checkpointing},
        micro_batch_size=8 // (case.data * case.accumulation),
        precision={"dtype": case.dtype},
        parallel={"pipeline": case.stages, "tensor": case.tensor},
        optimizer=optimizer_of(case),
    )
    return config


def optimizer_of(case: Case) -> dict[str, Any]:
    """Clipping that bites, as the case has it.

    With the usual eps of 1e-8, AdamW makes updates of full size from the rounding errors of
    gradients that are nearly zero: four micro-batches in one process part from one by 1e-5 in a
    single weight then.
    """
    optimizer: dict[str, Any] = {"lr": 3e-3, "clip_norm": case.clip_norm, "eps": 1e-6}
    if case.model == "olmo":
        # Embeddings alone are in the group that does not decay, which one stage has not.
        optimizer |= {"decay_embeddings": False, "weight_decay": 0.0}
    return optimizer


class References:
    """The plain loop's figures, computed where they are asked for."""

    def __init__(self, data: Path, directory: Path) -> None:
        self.data = data
        self.directory = directory
        self.trainings_by_key: dict[Any, Training] = {}

    def of(self, case: Case) -> Training:
        key = case.model, case.clip_norm
        if key not in self.trainings_by_key:
            source = self.directory / case.model
            if not source.exists():
                section = ModelSection(config=MODELS[case.model])
                build_model(section, load_hf_config(section), seed=SEED).save_pretrained(source)
            config = run_config(self.data, {}, micro_batch_size=8, optimizer=optimizer_of(case))
            self.trainings_by_key[key] = plain_training(self.data, source, config)
        return self.trainings_by_key[key]


@pytest.fixture(scope="module")
def references(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(dataset, tmp_path_factory.mktemp("plain"))


def train_matrix(cases: list[Case], data: Path, directory: Path) -> dict[str, Any]:
    results_by_case: dict[str, Any] = {}
    for size in sorted({case.world_size for case in cases}):
        world = directory / f"world{size}"
        world.mkdir()
        jobs = {
            case.name: {
                "config": config_of(case, data),
                "deepspeed_config": case.engine,
                "save_at": STEPS,
                "save_to": str(directory / case.name),
            }
            for case in cases
            if case.world_size == size
        }
        results_by_case.update(train(size, jobs, world))
    return {"results": results_by_case, "directory": directory}


@pytest.fixture(scope="module")
def covering(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train_matrix(COVERING, dataset, tmp_path_factory.mktemp("covering"))


@pytest.fixture(scope="module")
def everything(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train_matrix(ALL, dataset, tmp_path_factory.mktemp("everything"))


def compare(case: Case, reference: Training, trained: dict[str, Any]) -> None:
    result = trained["results"][case.name]
    assert result["accumulation"] == case.accumulation
    assert_same_steps(result, reference, loss=LOSS[case.dtype], norm=NORM[case.dtype])
    if case.clip_norm:
        assert min(reference.norms) > case.clip_norm
    if case.dtype == "float32":
        masters = read_full_masters(trained["directory"] / case.name / "tensors")
        assert masters.keys() <= reference.weights.keys()
        assert sum(t.numel() for t in masters.values()) > 10_000
        own = {name: reference.weights[name] for name in masters}
        assert_same_tensors(masters, own, limit=WEIGHTS)


@pytest.mark.parametrize("case", COVERING, ids=lambda case: case.name)
def test_equals_plain_training(
    case: Case, references: References, covering: dict[str, Any]
) -> None:
    compare(case, references.of(case), covering)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_all_equal_plain_training(
    case: Case, references: References, everything: dict[str, Any]
) -> None:
    compare(case, references.of(case), everything)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_offloaded_optimizer_keeps_ties(
    dataset: Path, tmp_path: Path, references: References, dtype: str
) -> None:
    """DeepSpeed's ZeRO 1 accumulates elsewhere then, and would leave tied weights to part."""
    case = Case(2, 2, "zero1", 2, "llama", dtype=dtype)
    engine = tmp_path / "zero1_offload.json"
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 100_000}
    engine.write_text(json.dumps({"zero_optimization": zero}))
    job = {
        "config": config_of(case, dataset),
        "deepspeed_config": str(engine),
        "save_at": STEPS,
        "save_to": str(tmp_path / case.name),
    }
    results = train(2, {case.name: job}, tmp_path)
    compare(case, references.of(case), {"results": results, "directory": tmp_path})
