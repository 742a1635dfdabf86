"""A reward model under DeepSpeed against plain transformers and PyTorch in one process."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from bigtrain.cli import main
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
from tests.support.pairs import write_pairs

pytestmark = [pytest.mark.distributed]
SLOW = pytest.mark.slow
CENTERING = 0.05
PADDED = {"overrides": {"pad_token_id": 5}}
"""Another token than the one with which the dataset pads rows, and one of the data."""
OBJECTIVE = {"type": "reward", "center_rewards_coefficient": CENTERING}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs, and a small causal language model with weights."""
    directory = tmp_path_factory.mktemp("reward")
    write_pairs(directory / "pairs", vocab_size=VOCAB_SIZE, longest=LENGTH + 1)
    save_llama(directory / "base")
    return directory


def run_of(root: Path, **options: Any) -> dict[str, Any]:
    return score_heads.run_of(root, root / "pairs", OBJECTIVE, **options)


def plain_loss(
    places: dict[tuple[int, ...], tuple[str, int]], model: Any, documents: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Mean loss over pairs, and metrics: formulas of TRL 1.16 (reward_trainer.py)."""
    numbers = [places[tuple(one.tolist())] for one in documents]
    for (split, chosen), (other, rejected) in zip(numbers[0::2], numbers[1::2], strict=True):
        assert (split, chosen + 1, chosen % 2) == (other, rejected, 0)
    scores = scores_of(model, documents)[:, 0]
    high, low = scores[0::2], scores[1::2]
    loss = -logsigmoid(high - low).mean() + CENTERING * ((high + low) ** 2).mean()
    return loss, {
        "rewards/chosen": high.mean(),
        "rewards/rejected": low.mean(),
        "rewards/margins": (high - low).mean(),
        "rewards/accuracies": (high > low).float().mean(),
    }


@cache
def plain_run(root: Path, adapted: bool = False, padding: int = 0) -> Plain:
    loss = partial(plain_loss, places_of(root / "pairs"))
    tree, model = run_of(root, adapted=adapted), plain_model(root, 1, padding)
    return score_heads.plain_run(tree, model, loss, 2)


def test_the_plain_run_learns(root: Path) -> None:
    plain = plain_run(root)
    assert max(map(len, places_of(root / "pairs"))) == LENGTH  # a row without padding
    assert plain.rows[-1]["loss"] < plain.rows[0]["loss"]
    assert float((plain.weights["score.weight"] - plain.head).abs().max()) > 1e-2


@pytest.mark.parametrize(
    ("engine", "sections", "world_size"),
    [
        pytest.param("zero0", {}, 2, marks=SLOW),
        pytest.param("zero1", {}, 2, marks=SLOW),
        pytest.param("zero2", {"model": {"gradient_checkpointing": "full"}}, 2, marks=SLOW),
        ("zero3", {}, 2),
        pytest.param("zero1", {"parallel": {"tensor": 2}}, 2, marks=SLOW),
        ("zero1", {"parallel": {"pipeline": 2}, "model": PADDED}, 2),
        pytest.param("zero0", {"parallel": {"pipeline": 2}}, 4, marks=SLOW),
        pytest.param("zero1", {"parallel": {"tensor": 2, "pipeline": 2}}, 4, marks=SLOW),
        pytest.param("zero1", {"parallel": {"sequence": 2}, "model": PADDED}, 2, marks=SLOW),
        pytest.param("zero3", {"parallel": {"sequence": {"ring": 2}}}, 2, marks=SLOW),
        pytest.param("zero3", {"parallel": {"tensor": 2, "sequence": 2}}, 4, marks=SLOW),
    ],
    ids=[
        *("zero0", "zero1", "recomputed", "zero3", "tensor", "stages", "data_stages"),
        *("tensor_stages", "sequence", "ring", "tensor_sequence"),
    ],
)
def test_a_reward_model_is_that_of_a_plain_loop(
    root: Path, engine: str, sections: dict[str, Any], world_size: int
) -> None:
    tree = run_of(root, engine={"deepspeed_config": engine}, **sections)
    tree["model"] = {"path": str(root / "base"), **tree["model"]}
    name = f"{engine}-{degrees_name(sections)}-{len(sections)}-{world_size}"
    padding = sections.get("model", {}).get("overrides", {}).get("pad_token_id", 0)
    compare(root / name, train(root, name, tree, world_size), plain_run(root, padding=padding))


@pytest.mark.slow
def test_stages_are_exported_as_transformers_reads_them(root: Path) -> None:
    tree = run_of(root, engine={"deepspeed_config": "zero1"}, parallel={"pipeline": 2})
    train(root, "exported", tree, 2)
    words = {f"t{number}": number for number in range(VOCAB_SIZE)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="t0"))
    )
    tokenizer.save_pretrained(root / "exported/tokenizer")
    assert main(["export", "--run", str(root / "exported"), "--output", str(root / "hf")]) == 0
    model = AutoModelForSequenceClassification.from_pretrained(root / "hf", dtype=torch.float32)
    for name, tensor in plain_run(root).weights.items():
        torch.testing.assert_close(model.state_dict()[name], tensor, atol=1e-5, rtol=1e-5)


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
