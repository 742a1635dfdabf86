"""Rotary embeddings that depend on a text's length: of every document alone, however it is cut."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bigtrain.models.build import build_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.settings.run_config import ModelSection
from tests.parity.conftest import SEED, llama, train_cases
from tests.parity.plain import Training, plain_training, read_steps
from tests.parity.test_isolation import LENGTH, SAMPLES, config_for
from tests.support.longrope import longrope

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

# Of samples that are one text each, the first half is short; of documents, some are long.
MODELS = {
    kind: llama(
        model_type="phi3", pad_token_id=None, initializer_range=0.2, **longrope(4, original)
    )
    for kind, original in (("samples", LENGTH // 2 + 4), ("documents", 7))
}
STEPS = 2
CASES: dict[str, dict[str, Any]] = {
    "samples sequence": {"parallel": {"sequence": 2}},
    "samples ring": {"parallel": {"sequence": {"ring": 2}}},
    "documents ring": {"parallel": {"sequence": {"ring": 2}}},
    "documents tiles": {"tiled_mlp": 3},
    "documents data": {},
    "documents sequence": {"parallel": {"sequence": 2}},
    "documents tensor": {"parallel": {"tensor": 2}},
    "documents pipeline": {"parallel": {"pipeline": 2}},
    "documents recompute": {"gradient_checkpointing": "full"},
}

SLOW = ["samples sequence", "documents tiles", "documents data", "documents tensor"]
SLOW += ["documents ring", "documents recompute"]


def config_of(data: Path, name: str) -> dict[str, Any]:
    kind, changes = name.split()[0], dict(CASES[name])
    parallel = changes.pop("parallel", {})
    model = {"config": MODELS[kind], **changes}
    config = config_for(data, model, 1) | {"parallel": parallel}
    # With Adam's own, plain training with sums in other orders is off by as much as 1.5e-5 here.
    config["optimizer"] = config["optimizer"] | {"eps": 1e-3}
    if kind == "samples":
        config["data"] = {"path": str(data)}
    return config


@pytest.fixture(scope="module")
def expected(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Training]:
    trainings_by_kind = {}
    for kind, values in MODELS.items():
        section = ModelSection(config=values)
        directory = tmp_path_factory.mktemp("hf") / kind
        build_model(section, load_hf_config(section), seed=SEED).save_pretrained(directory)
        config = config_of(dataset, "documents data" if kind == "documents" else "samples sequence")
        trainings_by_kind[kind] = plain_training(dataset, directory, config, num_steps=STEPS)
    return trainings_by_kind


@pytest.fixture(scope="module")
def trained(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    names = [name for name in CASES if name not in SLOW]
    return train(names, dataset, tmp_path_factory.mktemp("rotary"))


@pytest.fixture(scope="module")
def slow_trained(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(SLOW, dataset, tmp_path_factory.mktemp("slow_rotary"))


def train(names: list[str], dataset: Path, place: Path) -> dict[str, Any]:
    cases = {
        name: {
            "config": config_of(dataset, name),
            "deepspeed_config": "pipeline_zero1" if "pipeline" in name else "zero1",
            "last_step": STEPS,
        }
        for name in names
    }
    return train_cases(2, cases, place)


def test_documents_are_on_both_sides(dataset: Path) -> None:
    steps = read_steps(dataset, config_of(dataset, "documents data"))[:STEPS]
    lengths = []
    for step in steps:
        assert step.positions is not None
        assert len(step.positions) == SAMPLES
        for row in step.positions:
            edges = [*(row == 0).nonzero().flatten().tolist(), LENGTH]
            lengths += [stop - start for start, stop in pairwise(edges)]
    assert min(lengths) <= 7 < max(lengths)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in CASES]
)
def test_equals_plain_training(
    name: str, expected: dict[str, Training], request: pytest.FixtureRequest
) -> None:
    reference = expected[name.split()[0]]
    trained = request.getfixturevalue("slow_trained" if name in SLOW else "trained")
    assert trained[name]["losses"] == pytest.approx(reference.losses, abs=1e-5)
    assert trained[name]["norms"] == pytest.approx(reference.norms, rel=1e-4)
