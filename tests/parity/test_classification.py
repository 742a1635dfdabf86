"""A classifier under DeepSpeed against plain transformers and PyTorch in one process."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from bigtrain.data.shards.dataset import open_dataset
from bigtrain.data.shards.manifest import SPLITS
from tests.parity import score_heads
from tests.parity.objective_runs import VOCAB_SIZE, degrees_name, save_llama, train
from tests.parity.score_heads import (
    LENGTH,
    Plain,
    compare,
    places_of,
    plain_model,
    scores_of,
)
from tests.support.rated import write_rated

pytestmark = [pytest.mark.distributed]
SLOW = pytest.mark.slow
LABELS = ("low", "middle", "high")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples with labels, and a small causal language model with weights."""
    directory = tmp_path_factory.mktemp("classification")
    write_rated(
        directory / "rated",
        vocab_size=VOCAB_SIZE,
        shards=(20, 1, 19),
        held_out=9,
        longest=LENGTH + 1,
        labels=LABELS,
    )
    save_llama(directory / "base")
    return directory


def run_of(root: Path, **options: Any) -> dict[str, Any]:
    return score_heads.run_of(root, root / "rated", {"type": "classification"}, **options)


def plain_loss(
    root: Path,
    places: dict[tuple[int, ...], tuple[str, int]],
    model: Any,
    documents: list[torch.Tensor],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Mean loss over samples, and metrics."""
    numbers = [places[tuple(one.tolist())] for one in documents]
    shards = open_dataset(root / "rated")
    labels = {split: np.concatenate([s.labels for s in shards.shards(split)]) for split in SPLITS}
    classes = torch.tensor([int(labels[split][number]) for split, number in numbers])
    scores = scores_of(model, documents)
    accuracy = (scores.argmax(-1) == classes).float().mean()
    return cross_entropy(scores, classes), {"accuracy": accuracy}


@cache
def plain_run(root: Path, adapted: bool = False) -> Plain:
    loss = partial(plain_loss, root, places_of(root / "rated"))
    tree = run_of(root, adapted=adapted)
    return score_heads.plain_run(tree, plain_model(root, len(LABELS)), loss, 1)


def test_the_plain_run_learns(root: Path) -> None:
    plain = plain_run(root)
    assert max(map(len, places_of(root / "rated"))) == LENGTH  # a row without padding
    assert plain.rows[-1]["loss"] < plain.rows[0]["loss"]
    assert float((plain.weights["score.weight"] - plain.head).abs().max()) > 1e-2


@pytest.mark.parametrize(
    ("engine", "sections", "world_size"),
    [
        pytest.param("zero0", {}, 2, marks=SLOW),
        pytest.param("zero1", {}, 2, marks=SLOW),
        pytest.param("zero2", {"model": {"gradient_checkpointing": "full"}}, 2, marks=SLOW),
        pytest.param("zero3", {}, 2, marks=SLOW),
        pytest.param("zero1", {"parallel": {"tensor": 2}}, 2, marks=SLOW),
        pytest.param("zero1", {"parallel": {"pipeline": 2}}, 2, marks=SLOW),
        pytest.param("zero0", {"parallel": {"pipeline": 2}}, 4, marks=SLOW),
        pytest.param("zero1", {"parallel": {"tensor": 2, "pipeline": 2}}, 4, marks=SLOW),
        ("zero1", {"parallel": {"sequence": 2}}, 2),
        pytest.param("zero3", {"parallel": {"sequence": {"ring": 2}}}, 2, marks=SLOW),
        pytest.param("zero3", {"parallel": {"tensor": 2, "sequence": 2}}, 4, marks=SLOW),
    ],
    ids=[
        *("zero0", "zero1", "recomputed", "zero3", "tensor", "stages", "data_stages"),
        *("tensor_stages", "sequence", "ring", "tensor_sequence"),
    ],
)
def test_a_classifier_is_that_of_a_plain_loop(
    root: Path, engine: str, sections: dict[str, Any], world_size: int
) -> None:
    tree = run_of(root, engine={"deepspeed_config": engine}, **sections)
    tree["model"] = {"path": str(root / "base"), **tree["model"]}
    name = f"{engine}-{degrees_name(sections)}-{len(sections)}-{world_size}"
    compare(root / name, train(root, name, tree, world_size), plain_run(root))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "sections"),
    [
        ("zero1", {}),
        ("zero3", {}),
        ("zero1", {"parallel": {"tensor": 2}}),
        ("zero1", {"parallel": {"pipeline": 2}}),
        ("zero3", {"parallel": {"sequence": 2}}),
    ],
    ids=["zero1", "zero3", "tensor", "pipeline", "sequence"],
)
def test_adapters_with_a_trained_head_are_those_of_a_plain_loop(
    root: Path, engine: str, sections: dict[str, Any]
) -> None:
    tree = run_of(root, adapted=True, engine={"deepspeed_config": engine}, **sections)
    name = "-".join(["adapted", engine, *sections.get("parallel", {})])
    compare(root / name, train(root, name, tree, 2), plain_run(root, adapted=True))


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [({}, {}), ({"pipeline": 2}, {}), ({}, {"pipeline": 2})])
def test_a_resume_on_other_ranks_continues_as_the_plain_loop(
    root: Path, degrees: tuple[dict[str, int], dict[str, int]]
) -> None:
    first, second = degrees
    tree = run_of(root, engine={"deepspeed_config": "zero1"})
    name = "resumed-" + "-".join("".join(one) for one in degrees)
    rows = train(root, name, {**tree, "train": {"steps": 4}, "parallel": first}, 2)
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4]
    allowed = {"every_steps": 4, "allow_changes": ["train.steps"]}
    tree = {**tree, "checkpoint": allowed, "parallel": second}
    continued = train(root, name, tree, 2 if second else 1)
    compare(root / name, continued, plain_run(root))
