"""Preference losses under DeepSpeed against plain transformers and PyTorch in one process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

import bigtrain
from bigtrain.data.loading.loader import open_training_data
from bigtrain.parity.adapters import with_adapters
from bigtrain.settings.batch_plan import plan_batch
from bigtrain.settings.loading import parse_run_config
from tests.parity import objective_runs
from tests.parity.objective_runs import VOCAB_SIZE, degrees_name, save_experts, save_llama, steps_of
from tests.support.lives import shared_server
from tests.support.pairs import write_pairs

pytestmark = [pytest.mark.distributed]

LENGTH, STEPS, BETA = 32, 20, 0.3
ADAPTERS = {"type": "lora", "rank": 4, "alpha": 16.0}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs, and a small model with weights."""
    directory = tmp_path_factory.mktemp("objectives")
    write_pairs(directory / "pairs", vocab_size=VOCAB_SIZE)
    save_llama(directory / "base")
    save_experts(directory / "base", directory / "experts")
    return directory


def run_of(root: Path, loss: str, *, full: bool = False, **sections: Any) -> dict[str, Any]:
    gamma = {"gamma": 0.4} if loss == "simpo" else {}
    return {
        "model": {"path": str(root / "base")},
        "objective": {"type": "preference", "loss": loss, "beta": BETA, **gamma},
        "data": {"path": str(root / "pairs"), "allow_other_tokenizer": True},
        "batch": {"sequence_length": LENGTH, "global_batch_size": 8, "micro_batch_size": 2},
        "train": {"steps": STEPS},
        "optimizer": {"lr": 3e-3, "weight_decay": 0.0, "clip_norm": 1.0},
        "schedule": {"type": "constant"},
        "precision": {"dtype": "float32"},
        "logging": {"every_steps": 1},
        "checkpoint": {"every_steps": STEPS // 2},
        "output": {"directory": str(root / "run"), "export": False},
        **({} if full or loss in ("simpo", "orpo") else {"adapters": ADAPTERS}),
        **sections,
    }


def log_probabilities(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of the targets: float32 [R, T]; 0 elsewhere."""
    logits = model(input_ids=ids, use_cache=False).logits.float()
    values = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return values * (labels != -100)


def plain_loss(
    loss: str, policy: torch.Tensor, reference: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of each pair, and rewards of rows; formulas of TRL 1.16 (dpo_trainer.py,
    experimental/cpo, experimental/orpo), ORPO's first term as in its paper: the mean of a row."""
    if loss in ("sigmoid", "ipo"):
        ratios = policy - reference
        rewards = BETA * ratios
        if loss == "sigmoid":
            return -F.logsigmoid(BETA * (ratios[0::2] - ratios[1::2])), rewards
        means = ratios / lengths
        return (means[0::2] - means[1::2] - 1 / (2 * BETA)) ** 2, rewards
    means = policy / lengths
    chosen, rejected = means[0::2], means[1::2]
    if loss == "simpo":
        return -F.logsigmoid(BETA * (chosen - rejected - 0.4 / BETA)), BETA * means
    log_odds = (chosen - rejected) - (
        torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected))
    )
    return -chosen - BETA * F.logsigmoid(log_odds), BETA * means


@cache
def plain_run(
    root: Path, loss: str, full: bool = False, base_name: str = "base"
) -> tuple[list[float], list[float], list[dict[str, float]], dict[str, Any]]:
    """Losses, norms of gradients and rewards of every step, and the trained weights."""
    config = parse_run_config(run_of(root, loss, full=full))
    model: Any = AutoModelForCausalLM.from_pretrained(root / base_name, dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(root / base_name, dtype=torch.float32).eval()
    if config.adapters is not None:
        model = with_adapters(model, config.adapters, config.seed)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    section = config.optimizer
    optimizer = torch.optim.AdamW(
        trained, section.lr, tuple(section.betas), section.eps, weight_decay=0.0
    )
    plan, _ = plan_batch(config.batch, 1)
    assert plan is not None
    batches = open_training_data(config, replace(plan, rows_per_sample=2), 0)
    losses, norms, rewards = [], [], []
    for step in range(STEPS):
        parts = batches.step(8 * step)
        ids = torch.cat([part.input_ids for part in parts])
        labels = torch.cat([part.labels for part in parts])
        lengths = (labels != -100).sum(-1)
        with torch.no_grad():
            reference = log_probabilities(base, ids, labels).sum(-1)
        policy = log_probabilities(model, ids, labels).sum(-1)
        values, reward = plain_loss(loss, policy, reference, lengths)
        optimizer.zero_grad()
        values.mean().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, 1.0)))
        optimizer.step()
        losses.append(float(values.detach().mean()))
        chosen, rejected = reward.detach()[0::2], reward.detach()[1::2]
        rewards.append(
            {
                "rewards/accuracies": float((chosen > rejected).float().mean()),
                "rewards/chosen": float(chosen.mean()),
                "rewards/margins": float((chosen - rejected).mean()),
                "rewards/rejected": float(rejected.mean()),
            }
        )
    batches.close()
    return losses, norms, rewards, model.state_dict()


def train(root: Path, name: str, tree: dict[str, Any], world_size: int) -> list[dict[str, Any]]:
    return steps_of(objective_runs.train(root, name, tree, world_size))


def compare_rewards(rows: list[dict[str, Any]], rewards: list[dict[str, float]]) -> None:
    """Compare recorded rewards; accuracies only where rewards differ: before the first update they
    are zero, or what rounding leaves of passes in other shapes."""
    for row, expected in zip(rows, rewards, strict=True):
        names = [key for key in expected if row["step"] > 1 or key != "rewards/accuracies"]
        recorded = {key: row["recorded"][key] for key in names}
        wanted = {key: expected[key] for key in names}
        assert recorded == pytest.approx(wanted, abs=2e-5, rel=1e-5)


def num_ranks(parallel: dict[str, Any]) -> int:
    """Return the ranks of one copy of the model, at least 2."""
    degrees = [prod(d.values()) if isinstance(d, dict) else d for d in parallel.values()]
    return max(2, prod(degrees))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "loss", ["sigmoid", *(pytest.param(other, marks=SLOW) for other in ("ipo", "orpo", "simpo"))]
)
@pytest.mark.parametrize(
    ("engine", "sections"),
    [
        pytest.param("zero0", {}, marks=SLOW),
        pytest.param("zero1", {}, marks=SLOW),
        ("zero3", {}),
        pytest.param("zero1", {"parallel": {"tensor": 2}}, marks=SLOW),
        pytest.param("zero1", {"parallel": {"sequence": 2}}, marks=SLOW),
        pytest.param("zero3", {"parallel": {"sequence": {"ring": 2}}}, marks=SLOW),
        pytest.param("zero1", {"parallel": {"pipeline": 2}}, marks=SLOW),
        pytest.param("zero0", {"parallel": {"tensor": 2, "pipeline": 2}}, marks=SLOW),
        pytest.param("zero3", {"parallel": {"tensor": 2, "sequence": 2}}, marks=SLOW),
        pytest.param("zero1", {"parallel": {"sequence": {"ulysses": 2, "ring": 2}}}, marks=SLOW),
    ],
    ids=lambda value: degrees_name(value) if isinstance(value, dict) else value,
)
def test_a_preference_loss_is_that_of_a_plain_loop(
    root: Path, loss: str, engine: str, sections: dict[str, Any]
) -> None:
    tree = run_of(root, loss, engine={"deepspeed_config": engine}, **sections)
    tree["model"] = {**tree["model"], "loss": "chunked", "loss_chunk_tokens": 7}
    name = f"{loss}-{engine}-{degrees_name(sections)}"
    rows = train(root, name, tree, num_ranks(sections.get("parallel", {})))
    losses, norms, rewards, _ = plain_run(root, loss)
    assert [row["loss"] for row in rows] == pytest.approx(losses, abs=1e-5, rel=1e-5)
    # AdamW does not depend on the scale of the gradient, and the norm does.
    assert [row["grad_norm"] for row in rows] == pytest.approx(norms, rel=1e-4)
    assert losses[-1] < losses[0]
    compare_rewards(rows, rewards)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["sigmoid", pytest.param("ipo", marks=SLOW)])
@pytest.mark.parametrize(
    ("engine", "sections"),
    [
        pytest.param("zero1", {}, marks=SLOW),
        ("zero3", {}),
        pytest.param("zero1", {"parallel": {"tensor": 2}}, marks=SLOW),
        pytest.param("zero3", {"parallel": {"sequence": 2}}, marks=SLOW),
        pytest.param("zero0", {"parallel": {"sequence": {"ring": 2}}}, marks=SLOW),
        pytest.param("zero0", {"parallel": {"pipeline": 2}}, marks=SLOW),
        pytest.param("zero1", {"parallel": {"expert": 2}}, marks=SLOW),
        pytest.param("zero3", {"parallel": {"expert": 2}}, marks=SLOW),
    ],
    ids=lambda value: degrees_name(value) if isinstance(value, dict) else value,
)
def test_all_weights_are_trained_against_scores_of_the_first_ones(
    root: Path, loss: str, engine: str, sections: dict[str, Any]
) -> None:
    """Half of it on two ranks, the rest on one, which reads the scores."""
    tree = run_of(root, loss, full=True, engine={"deepspeed_config": engine}, **sections)
    base = "experts" if "expert" in sections.get("parallel", {}) else "base"
    tree["model"] = {"path": str(root / base)}
    name = f"full-{loss}-{engine}-{degrees_name(sections)}"
    train(root, name, tree | {"train": {"steps": STEPS // 2}}, 2)
    scores = bigtrain.open_scores(root / name / "reference").sums("train")
    assert scores.shape == (96,)
    assert (scores < 0).all()
    more = {"checkpoint": {"allow_changes": ["train.steps"]}, "parallel": {}}
    rows = train(root, name, tree | more, 1)
    losses, _, rewards, weights = plain_run(root, loss, full=True, base_name=base)
    assert [row["loss"] for row in rows] == pytest.approx(losses, abs=1e-5, rel=1e-5)
    compare_rewards(rows, rewards)
    trained = bigtrain.load_state_dict(root / name)
    for key, tensor in weights.items():
        if key in trained:
            torch.testing.assert_close(trained[key], tensor, atol=1e-5, rtol=1e-5)
    assert len(trained) >= 20


@pytest.mark.slow
def test_adapters_go_on_in_stages(root: Path) -> None:
    """Which compute no reference, so that its scores are made when the run resumes."""
    tree = run_of(root, "sigmoid", engine={"deepspeed_config": "zero1"})
    train(root, "to-stages", tree | {"train": {"steps": STEPS // 2}}, 2)
    more = {"checkpoint": {"allow_changes": ["train.steps"]}, "parallel": {"pipeline": 2}}
    rows = train(root, "to-stages", tree | more, 2)
    losses, _, rewards, _ = plain_run(root, "sigmoid")
    assert [row["loss"] for row in rows] == pytest.approx(losses, abs=1e-5, rel=1e-5)
    compare_rewards(rows, rewards)


def test_lost_scores_are_refused(root: Path) -> None:
    tree = run_of(root, "sigmoid", full=True, train={"steps": 2}, checkpoint={"every_steps": 1})
    train(root, "lost", tree, 1)
    (lost,) = (root / "lost/reference").glob("data-*/train-00000.sums.npy")
    lost.unlink()
    again = root / "lost.yaml"
    more = ("train.steps=3", "checkpoint.allow_changes=[train.steps]")
    codes, output = shared_server().live(["--config", str(again), *more], world_size=2)
    assert codes == [2, 2]
    assert "the reference model of this run is gone with it" in output


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"parallel": {"sequence": 2}},
        pytest.param({"parallel": {"tensor": 2}}, marks=SLOW),
        pytest.param({"parallel": {"pipeline": 2}}, marks=SLOW),
        pytest.param({"parallel": {"sequence": {"ring": 2}}}, marks=SLOW),
        pytest.param({"parallel": {"tensor": 2, "sequence": 2}}, marks=SLOW),
    ],
    ids=degrees_name,
)
def test_a_sum_that_a_loss_records_does_not_depend_on_the_layout(
    root: Path, sections: dict[str, Any]
) -> None:
    tree = run_of(root, "simpo", full=True, train={"steps": 1}, **sections)
    tree["objective"] = {"type": "tests.parity.objective_runs:SummedPairs"}
    tree["checkpoint"] = {"every_steps": None}
    world_size = 4 if len(sections.get("parallel", {})) == 2 else 2
    (row,) = train(root, f"sums-{degrees_name(sections)}", tree, world_size)
    config = parse_run_config(tree)
    plan, _ = plan_batch(config.batch, 1)
    assert plan is not None
    batches = open_training_data(config, replace(plan, rows_per_sample=2), 0)
    parts = batches.step(0)
    ids, labels = (torch.cat([getattr(p, n) for p in parts]) for n in ("input_ids", "labels"))
    batches.close()
    model = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
    with torch.no_grad():
        chosen = float(log_probabilities(model, ids, labels).sum(-1)[0::2].sum())
    assert row["recorded"] == {"pairs": 8, "chosen": pytest.approx(chosen, rel=1e-5)}
