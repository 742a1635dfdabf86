"""KTO under DeepSpeed against plain transformers and PyTorch in one process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.nn.functional import sigmoid
from transformers import AutoModelForCausalLM

import bigtrain
from bigtrain.data.loading.loader import open_held_out, open_training_data
from bigtrain.data.shards.dataset import open_dataset
from bigtrain.parity.adapters import with_adapters
from bigtrain.settings.batch_plan import plan_batch
from bigtrain.settings.loading import parse_run_config
from tests.parity.objective_runs import VOCAB_SIZE, degrees_name, save_llama, train
from tests.support.lives import shared_server
from tests.support.rated import write_rated

pytestmark = [pytest.mark.distributed]
SLOW = pytest.mark.slow

LENGTH, STEPS, BETA = 32, 6, 0.5
HALF = STEPS // 2
DESIRABLE, UNDESIRABLE = 1.0, 1.4
ADAPTERS = {"type": "lora", "rank": 4, "alpha": 16.0}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rated answers, and a small model with weights."""
    directory = tmp_path_factory.mktemp("kto")
    write_rated(directory / "rated", vocab_size=VOCAB_SIZE, shards=(20, 1, 19), held_out=7)
    save_llama(directory / "base")
    return directory


def run_of(root: Path, *, full: bool = False, **sections: Any) -> dict[str, Any]:
    """Run whose step is two micro-batches on each of two ranks."""
    return {
        "model": {"path": str(root / "base")},
        "objective": {
            "type": "kto",
            "beta": BETA,
            "desirable_weight": DESIRABLE,
            "undesirable_weight": UNDESIRABLE,
        },
        **({} if full else {"adapters": ADAPTERS}),
        "data": {"path": str(root / "rated"), "allow_other_tokenizer": True},
        "batch": {"sequence_length": LENGTH, "global_batch_size": 8, "micro_batch_size": 2},
        "train": {"steps": STEPS},
        "optimizer": {"lr": 5e-3, "weight_decay": 0.0, "clip_norm": 0.2},
        "schedule": {"type": "constant"},
        "precision": {"dtype": "float32"},
        "logging": {"every_steps": 1},
        "evaluation": {"every_steps": HALF},
        "checkpoint": {"every_steps": HALF},
        "output": {"directory": str(root / "run"), "export": False},
        **sections,
    }


def summed(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the targets of each row, summed: float32 [R]."""
    logits = model(input_ids=ids, use_cache=False).logits.float()
    values = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (values * (labels != -100)).sum(-1)


@cache
def labels_by_tokens(path: Path) -> dict[tuple[int, ...], bool]:
    """Label of each document, by its tokens, from the files."""
    dataset = open_dataset(path)
    shards = [*dataset.shards("train"), *dataset.shards("held_out")]
    return {
        tuple(shard.document(number).tolist()): bool(shard.labels[number])
        for shard in shards
        for number in range(shard.num_documents)
    }


def is_desirable(root: Path, ids: torch.Tensor, labels: torch.Tensor) -> bool:
    last = int((labels != -100).nonzero()[-1])
    return labels_by_tokens(root / "rated")[(*ids[: last + 1].tolist(), int(labels[last]))]


def plain_loss(
    root: Path, model: Any, base: Any, parts: list[Any]
) -> tuple[torch.Tensor, dict[str, float], float]:
    """Mean loss over `parts`, metrics, and the divergence before it is clamped; as in `kto_loss` of
    TRL (experimental/kto/kto_trainer.py) for a batch of all of them."""
    ids, labels = (torch.cat([getattr(p, name) for p in parts]) for name in ("input_ids", "labels"))
    present = (labels != -100).any(-1)[0::2]
    with torch.no_grad():
        reference = summed(base, ids, labels)
        mismatched = (summed(model, ids[1::2], labels[1::2]) - reference[1::2])[present].mean()
    kl = mismatched.clamp(min=0)
    policy = summed(model, ids[0::2], labels[0::2])
    ratios = (policy - reference[0::2])[present]
    policy, answers = policy[present], (ids[0::2][present], labels[0::2][present])
    likes = torch.tensor([is_desirable(root, *row) for row in zip(*answers, strict=True)])
    chosen, rejected = ratios[likes], ratios[~likes]
    losses = torch.cat(
        [
            DESIRABLE * (1 - sigmoid(BETA * (chosen - kl))),
            UNDESIRABLE * (1 - sigmoid(BETA * (kl - rejected))),
        ]
    )
    metrics = {
        "kl": kl,
        "rewards/chosen": BETA * chosen.mean(),
        "rewards/rejected": BETA * rejected.mean(),
        "logps/chosen": policy[likes].mean(),
        "logps/rejected": policy[~likes].mean(),
    }
    metrics_by_name = {name: float(value.detach()) for name, value in metrics.items()}
    return losses.mean(), metrics_by_name, float(mismatched)


@cache
def plain_run(
    root: Path, full: bool = False
) -> tuple[list[dict[str, Any]], list[float], dict[str, Any], list[float]]:
    """Loss, norm and metrics of every step, held-out losses, the trained weights, divergences."""
    config = parse_run_config(run_of(root, full=full))
    model: Any = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32).eval()
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
    plan = replace(plan, rows_per_sample=2)
    batches = open_training_data(config, plan, 0)
    (held_out,) = open_held_out(config, plan, 0)
    rows, evaluated, divergences = [], [], []
    for step in range(STEPS):
        loss, metrics, divergence = plain_loss(root, model, base, batches.step(8 * step))
        optimizer.zero_grad()
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(trained, 0.2))
        optimizer.step()
        rows.append({"loss": float(loss.detach()), "grad_norm": norm, "recorded": metrics})
        divergences.append(divergence)
        if (step + 1) % HALF == 0:
            with torch.no_grad():
                evaluated.append(float(plain_loss(root, model, base, [*held_out.batches])[0]))
    batches.close()
    return rows, evaluated, model.state_dict(), divergences


def compare(root: Path, name: str, records: list[dict[str, Any]], *, full: bool = False) -> None:
    """Compare a run with the plain one. A divergence differs by the rounding of two sums."""
    expected, evaluated, weights, _ = plain_run(root, full)
    rows = [row for row in records if "loss" in row]
    losses, norms = ([row[key] for row in expected] for key in ("loss", "grad_norm"))
    assert [row["loss"] for row in rows] == pytest.approx(losses, abs=1e-5, rel=1e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx(norms, rel=1e-4)
    for row, plain in zip(rows, expected, strict=True):
        assert row["recorded"] == pytest.approx(plain["recorded"], abs=2e-5, rel=1e-5)
    held_out = [row["held_out_loss"] for row in records if "held_out_loss" in row]
    assert held_out == pytest.approx(evaluated, abs=1e-5, rel=1e-5)
    trained = bigtrain.load_state_dict(root / name)
    keys = [key for key in trained if full or "lora_" in key]
    assert len(keys) >= 8
    for key in keys:
        torch.testing.assert_close(trained[key], weights[key], atol=1e-5, rtol=1e-5)


def test_the_plain_run_has_both_signs_of_the_divergence(root: Path) -> None:
    """Otherwise a missing clamp, or a mean of clamped parts, would not be seen."""
    rows, _, _, divergences = plain_run(root)
    assert min(divergences) < -0.05
    assert max(divergences) > 0.05
    assert rows[-1]["loss"] < rows[0]["loss"]


@pytest.mark.parametrize(
    ("engine", "sections", "world_size"),
    [
        pytest.param("zero0", {}, 2, marks=SLOW),
        pytest.param("zero1", {}, 2, marks=SLOW),
        ("zero3", {}, 2),
        pytest.param("zero1", {"parallel": {"tensor": 2}}, 2, marks=SLOW),
        pytest.param("zero1", {"parallel": {"sequence": 2}}, 2, marks=SLOW),
        pytest.param("zero3", {"parallel": {"sequence": {"ring": 2}}}, 2, marks=SLOW),
        pytest.param("zero1", {"parallel": {"pipeline": 2}}, 2, marks=SLOW),
        pytest.param("zero0", {"parallel": {"pipeline": 2}}, 4, marks=SLOW),
        pytest.param("zero1", {"parallel": {"tensor": 2, "pipeline": 2}}, 4, marks=SLOW),
    ],
    ids=[
        *("zero0", "zero1", "zero3", "tensor", "sequence", "ring"),
        *("stages", "data_stages", "tensor_stages"),
    ],
)
def test_kto_is_that_of_a_plain_loop(
    root: Path, engine: str, sections: dict[str, Any], world_size: int
) -> None:
    tree = run_of(root, engine={"deepspeed_config": engine}, **sections)
    tree["model"] = {**tree["model"], "loss": "chunked", "loss_chunk_tokens": 7}
    name = f"{engine}-{degrees_name(sections)}"
    compare(root, name, train(root, name, tree, world_size))


@pytest.mark.slow
def test_a_resume_on_one_rank_goes_on_as_the_plain_loop(root: Path) -> None:
    tree = run_of(root, engine={"deepspeed_config": "zero1"})
    rows = train(root, "resumed", {**tree, "train": {"steps": HALF}}, 2)
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3]
    allowed = {"every_steps": HALF, "allow_changes": ["train.steps"]}
    compare(root, "resumed", train(root, "resumed", {**tree, "checkpoint": allowed}, 1))


@pytest.mark.parametrize(
    ("engine", "sections"),
    [
        pytest.param("zero1", {}, marks=SLOW),
        ("zero3", {}),
        pytest.param("zero1", {"parallel": {"tensor": 2}}, marks=SLOW),
        pytest.param("zero3", {"parallel": {"sequence": 2}}, marks=SLOW),
        pytest.param("zero1", {"parallel": {"pipeline": 2}}, marks=SLOW),
    ],
    ids=["zero1", "zero3", "tensor", "sequence", "stages"],
)
def test_all_weights_are_trained_against_scores_of_the_first_ones(
    root: Path, engine: str, sections: dict[str, Any]
) -> None:
    """Half of it on two ranks, the rest on one, which reads the scores."""
    tree = run_of(root, full=True, engine={"deepspeed_config": engine}, **sections)
    name = f"full-{engine}-{degrees_name(sections)}"
    train(root, name, {**tree, "train": {"steps": HALF}}, 2)
    scores = bigtrain.open_scores(next((root / name / "reference").glob("data-*")))
    assert scores.sums("train").shape == scores.mismatched_sums("train").shape == (40,)
    assert float(abs(scores.sums("train") - scores.mismatched_sums("train")).max()) > 1
    more = {"checkpoint": {"every_steps": HALF, "allow_changes": ["train.steps"]}, "parallel": {}}
    compare(root, name, train(root, name, {**tree, **more}, 1), full=True)


@pytest.mark.slow
def test_scores_that_were_made_beforehand_are_the_same(root: Path) -> None:
    tree = run_of(root, full=True, engine={"deepspeed_config": "zero1"})
    path = root / "scored.yaml"
    path.write_text(yaml.safe_dump(tree))
    words = ["-m", "bigtrain.cli", "score", "--config", str(path), "--output", str(root / "scores")]
    codes, printed = shared_server().live([], world_size=1, script=words)
    assert codes == [0], printed
    named = {**tree, "objective": {**tree["objective"], "reference": str(root / "scores")}}
    compare(root, "named", train(root, "named", named, 2), full=True)
