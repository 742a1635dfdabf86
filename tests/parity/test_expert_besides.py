"""Divided experts in 16 bit, and beside what else a run asks for, against plain training."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.conftest import STEPS, run_config, train_cases
from tests.parity.expert_models import OPTIMIZER, WEIGHTS, save_model
from tests.parity.plain import Spread, orders, plain_training, read_steps, root_mean_square
from tests.parity.routing import Choices, checksum, differing
from tests.parity.test_matrix import SPREADS
from tests.parity.test_zero_stages import LOSS, NORM
from tests.support.comparison import assert_same_steps, assert_same_tensors

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(1200)]

# Engine, processes, and degrees beside 2 for experts. The first of two stages has no experts.
IN_16_BIT: list[tuple[str, int, dict[str, int]]] = [
    ("zero1", 2, {}),
    ("zero2", 2, {}),
    ("zero3", 2, {}),
    ("pipeline_zero1", 4, {"pipeline": 2}),
    ("zero1", 4, {"tensor": 2}),
    ("zero3", 4, {"tensor": 2}),
    ("zero1", 4, {"sequence": 2}),
    ("zero3", 4, {"sequence": 2}),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("unrouted", tmp_path_factory.mktemp("hf") / "unrouted")


@pytest.fixture(scope="module")
def in_16_bit(
    dataset: Path, directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    place = tmp_path_factory.mktemp("experts_16_bit")
    results_by_case: dict[str, Any] = {}
    for world_size in sorted({size for _, size, _ in IN_16_BIT}):
        jobs = {
            str(number): {
                "config": run_config(
                    dataset,
                    {"path": str(directory)},
                    micro_batch_size=2,
                    parallel={"expert": 2, **degrees},
                    precision={"dtype": "bfloat16"},
                    optimizer=OPTIMIZER,
                ),
                "deepspeed_config": engine,
                "weights": {str(STEPS): str(place / f"{number}.pt")},
            }
            for number, (engine, size, degrees) in enumerate(IN_16_BIT)
            if size == world_size
        }
        world = place / str(world_size)
        world.mkdir()
        results_by_case |= train_cases(world_size, jobs, world)
    return [
        results_by_case[str(n)] | {"weights": torch.load(place / f"{n}.pt")}
        for n in range(len(IN_16_BIT))
    ]


@pytest.fixture(scope="module")
def spread(dataset: Path, directory: Path) -> Spread:
    """Of plain runs in bfloat16 that divide the samples otherwise."""
    config = run_config(dataset, {}, micro_batch_size=8, optimizer=OPTIMIZER)
    runs = [
        plain_training(dataset, directory, config, chunks=chunks, dtype=torch.bfloat16)
        for chunks in orders()
    ]
    return Spread.of(runs)


@pytest.mark.parametrize("number", range(len(IN_16_BIT)))
def test_16_bit_is_among_plain_runs(
    number: int, spread: Spread, in_16_bit: list[dict[str, Any]]
) -> None:
    """Norms above all: each of DeepSpeed's optimizers adds those of experts up in its own way."""
    result = in_16_bit[number]
    losses = [abs(a - b) for a, b in zip(result["losses"], spread.losses, strict=True)]
    norms = [abs(a - b) / b for a, b in zip(result["norms"], spread.norms, strict=True)]
    assert max(losses) <= SPREADS * spread.loss
    assert max(norms) <= SPREADS * spread.norm < 0.1
    assert root_mean_square(result["weights"], spread.weights) <= SPREADS * spread.weight


ISOLATED = {
    "model": {"loss": "chunked", "loss_chunk_tokens": 5},
    "data": {"document_boundaries": "isolate"},
}
RECOMPUTED = {**ISOLATED, "model": {**ISOLATED["model"], "gradient_checkpointing": "full"}}
# Engine, degrees beside 2 for experts, and what a run asks for besides.
BESIDES: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "offload": ("zero2_offload", {}, {}),
    "offload of parameters": ("zero3_offload", {}, {}),
    "documents, chunked loss": ("zero3", {}, ISOLATED),
    "frozen experts": ("zero1", {}, {"model": {"frozen": ("model.layers.2.mlp.experts.*",)}}),
    "frozen experts, ZeRO 3": (
        "zero3",
        {},
        {"model": {"frozen": ("model.layers.*.mlp.experts.*",)}},
    ),
    "all of it, offload, TP": ("zero2_offload", {"tensor": 2}, RECOMPUTED),
    "all of it, offload of parameters, TP": ("zero3_offload", {"tensor": 2}, RECOMPUTED),
    "all of it, PP": ("pipeline_zero1", {"pipeline": 2}, RECOMPUTED),
    "all of it, offload, PP": ("zero1_offload", {"pipeline": 2}, RECOMPUTED),
    "all of it, offload, SP": ("zero2_offload", {"sequence": 2}, RECOMPUTED),
    "all of it, offload of parameters, SP": ("zero3_offload", {"sequence": 2}, RECOMPUTED),
}
FROZEN = {
    "frozen experts": r"model\.layers\.2\.mlp\.experts",
    "frozen experts, ZeRO 3": r"model\.layers\.\d\.mlp\.experts",
}


def world_size_of(name: str) -> int:
    return 2 * math.prod(BESIDES[name][1].values())


def besides_config(name: str, data: Path, directory: Path) -> dict[str, Any]:
    _, degrees, sections = BESIDES[name]
    config: dict[str, Any] = run_config(
        data,
        {"path": str(directory), **sections.get("model", {})},
        micro_batch_size=2,
        parallel={"expert": 2, **degrees},
        optimizer=OPTIMIZER,
    )
    if "data" in sections:
        config["data"] = {"path": str(data), **sections["data"]}
    return config


def engine_file(name: str, directory: Path) -> str:
    """A file of ds_configs/, or ZeRO 1 with offload, which is the one of them that stages take."""
    if name != "zero1_offload":
        return name
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 100_000}
    file = directory / f"{name}.json"
    file.write_text(json.dumps({"zero_optimization": zero}))
    return str(file)


@pytest.fixture(scope="module")
def besides(
    dataset: Path, directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    place = tmp_path_factory.mktemp("experts_besides")
    results_by_case: dict[str, Any] = {}
    for world_size in (2, 4):
        world = place / str(world_size)
        world.mkdir()
        jobs = {
            name: {
                "config": besides_config(name, dataset, directory),
                "deepspeed_config": engine_file(engine, world),
                "watch_routing": True,
                "weights": {str(STEPS): str(place / f"{name}.pt")},
            }
            for name, (engine, _, _) in BESIDES.items()
            if world_size_of(name) == world_size
        }
        results_by_case |= train_cases(world_size, jobs, world)
    return {
        name: results_by_case[name] | {"weights": torch.load(place / f"{name}.pt")}
        for name in BESIDES
    }


@pytest.mark.parametrize("name", BESIDES)
def test_equals_plain_training_besides(
    name: str, dataset: Path, directory: Path, besides: dict[str, Any]
) -> None:
    config = besides_config(name, dataset, directory)
    choices: list[Choices] = []
    expected = plain_training(
        dataset,
        directory,
        config,
        frozen=FROZEN.get(name, "nothing"),
        watch=lambda model: choices.append(Choices(model)),
    )
    result = besides[name]
    samples = [[checksum(row) for row in step.inputs] for step in read_steps(dataset, config)]
    assert differing(result["choices"], choices[0].of_one(samples)) == {}
    assert_same_steps(result, expected, loss=LOSS["float32"], norm=NORM["float32"])
    assert_same_tensors(result["weights"], expected.weights, limit=WEIGHTS)
