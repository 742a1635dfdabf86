"""Objectives with a reference, trained with dropout: the model has dropout in the passes that it is
trained in, the reference and the estimate of KTO's divergence have none, as in an evaluation.

The learning rate is almost 0, so that the model is its reference except for dropout: a pass with
dropout, or scores of another sample, would show in the rewards.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bigtrain.data.loading.loader import open_training_data
from bigtrain.settings.batch_plan import plan_batch
from bigtrain.settings.loading import parse_run_config
from tests.parity.objective_runs import VOCAB_SIZE, save_llama, steps_of, train
from tests.parity.test_kto import summed
from tests.support.pairs import write_pairs
from tests.support.rated import write_rated

pytestmark = [pytest.mark.distributed]

LENGTH, STEPS, BETA, SAMPLES = 32, 6, 0.5, 8
ADAPTERS = {"adapters": {"type": "lora", "rank": 4, "alpha": 16.0}}
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
    return {
        "model": {"path": str(root / "base"), "overrides": overrides, "attention": "eager"},
        "objective": objective,
        "data": {"path": str(root / objective["type"]), "allow_other_tokenizer": True},
        "batch": {"sequence_length": LENGTH, "global_batch_size": SAMPLES, "micro_batch_size": 4},
        "train": {"steps": STEPS},
        "optimizer": {"lr": 1e-9, "weight_decay": 0.0},
        "schedule": {"type": "constant"},
        "precision": {"dtype": "float32"},
        "logging": {"every_steps": 1},
        "output": {"directory": str(root / "run"), "export": False},
        **sections,
    }


@torch.no_grad()
def reference_scores(root: Path, tree: dict[str, Any]) -> list[dict[str, float]]:
    """Return the mean score of the chosen and of the rejected answers of each step, by plain
    transformers without dropout."""
    model = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32).eval()
    config = parse_run_config(tree)
    plan, _ = plan_batch(config.batch, 1)
    assert plan is not None
    batches = open_training_data(config, replace(plan, rows_per_sample=2), 0)
    scores = []
    for step in range(STEPS):
        chosen, rejected = [], []
        for part in batches.step(SAMPLES * step):
            sums = summed(model, part.input_ids, part.labels)[part.labels.ne(-100).any(-1)]
            if part.desirable is None:
                chosen.append(sums[0::2])
                rejected.append(sums[1::2])
            else:
                likes = part.desirable[0::2]
                chosen.append(sums[0::2][likes])
                rejected.append(sums[0::2][~likes])
        means = {"chosen": torch.cat(chosen).mean(), "rejected": torch.cat(rejected).mean()}
        scores.append({side: float(mean) for side, mean in means.items()})
    batches.close()
    return scores


@pytest.mark.parametrize(
    ("objective", "sections", "world_size"),
    [
        (KTO, ADAPTERS, 1),
        (KTO, {}, 1),
        (PREFERENCE, ADAPTERS, 1),
        (PREFERENCE, {}, 1),
        (KTO, STAGES, 2),
        (PREFERENCE, STAGES, 2),
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
