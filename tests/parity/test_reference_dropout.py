"""Objectives with a reference, trained with dropout: the model has dropout in the passes that it is
trained in, the reference and the estimate of KTO's divergence have none, as in an evaluation.

The learning rate is almost 0, so that the model is its reference except for dropout: a pass with
dropout, or scores of another sample, would show in the rewards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.parity.objective_runs import (
    ADAPTERS,
    VOCAB_SIZE,
    log_probabilities,
    read_steps,
    run_tree,
    save_llama,
    steps_of,
    train,
)
from tests.support.pairs import write_pairs
from tests.support.rated import write_rated

pytestmark = [pytest.mark.distributed]

LENGTH, STEPS, BETA = 32, 3, 0.5
STAGES = {"parallel": {"pipeline": 2}}
KTO, PREFERENCE = {"type": "kto", "beta": BETA}, {"type": "preference", "beta": BETA}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dropout")
    write_pairs(directory / "preference", vocab_size=VOCAB_SIZE)
    write_rated(directory / "kto", vocab_size=VOCAB_SIZE, shards=(64,))
    save_llama(directory / "base")
    return directory


def run_of(root: Path, objective: dict[str, Any], sections: dict[str, Any]) -> dict[str, Any]:
    overrides = {"attention_dropout": 0.4}
    tree = run_tree(
        root,
        length=LENGTH,
        steps=STEPS,
        model={"path": str(root / "base"), "overrides": overrides, "attention": "eager"},
        objective=objective,
        data={"path": str(root / objective["type"]), "allow_other_tokenizer": True},
        optimizer={"lr": 1e-9, "weight_decay": 0.0},
        **sections,
    )
    tree["batch"]["micro_batch_size"] = 4
    return tree


@torch.no_grad()
def reference_scores(root: Path, tree: dict[str, Any]) -> list[dict[str, float]]:
    """Return the mean score of the chosen and of the rejected answers of each step, by plain
    transformers without dropout."""
    model = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32).eval()
    scores = []
    for parts in read_steps(tree, rows_per_sample=2):
        chosen, rejected = [], []
        for part in parts:
            sums = log_probabilities(model, part.input_ids, part.labels).sum(-1)
            sums = sums[part.labels.ne(-100).any(-1)]
            if part.desirable is None:
                chosen.append(sums[0::2])
                rejected.append(sums[1::2])
            else:
                likes = part.desirable[0::2]
                chosen.append(sums[0::2][likes])
                rejected.append(sums[0::2][~likes])
        means = {"chosen": torch.cat(chosen).mean(), "rejected": torch.cat(rejected).mean()}
        scores.append({side: float(mean) for side, mean in means.items()})
    return scores


@pytest.mark.parametrize(
    ("objective", "sections", "world_size"),
    [
        (KTO, {"adapters": ADAPTERS}, 1),
        pytest.param(KTO, {}, 1, marks=pytest.mark.slow),
        pytest.param(PREFERENCE, {"adapters": ADAPTERS}, 1, marks=pytest.mark.slow),
        pytest.param(PREFERENCE, {}, 1, marks=pytest.mark.slow),
        (KTO, STAGES, 2),
        pytest.param(PREFERENCE, STAGES, 2, marks=pytest.mark.slow),
    ],
    ids=["kto adapters", "kto", "pairs adapters", "pairs", "kto stages", "pairs stages"],
)
def test_only_the_trained_passes_have_dropout(
    root: Path,
    objective: dict[str, Any],
    sections: dict[str, Any],
    world_size: int,
    request: pytest.FixtureRequest,
) -> None:
    tree = run_of(root, objective, sections)
    name = f"run-{request.node.callspec.id}".replace(" ", "-")
    rows = steps_of(train(root, name, tree, world_size))
    for row, scores in zip(rows, reference_scores(root, tree), strict=True):
        recorded = row["recorded"]
        for side, score in scores.items():
            difference = recorded[f"logps/{side}"] - score
            assert abs(difference) > 0.01  # dropout of the model
            assert recorded[f"rewards/{side}"] == pytest.approx(BETA * difference, abs=5e-5)
        assert recorded.get("kl", 0.0) == pytest.approx(0.0, abs=5e-5)
