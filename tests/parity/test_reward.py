"""A reward model under DeepSpeed against plain transformers and PyTorch in one process."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM

import bigtrain
from bigtrain.data.loading.loader import open_held_out, open_training_data
from bigtrain.data.shards.dataset import open_dataset
from bigtrain.models.layers.parameters import seed_of
from bigtrain.parity.adapters import with_adapters
from bigtrain.settings.batch_plan import plan_batch
from bigtrain.settings.loading import parse_run_config
from tests.support.lives import shared_server
from tests.support.pairs import write_pairs

pytestmark = [pytest.mark.distributed]
SLOW = pytest.mark.slow

VOCAB_SIZE, LENGTH, STEPS, CENTERING, SPREAD = 96, 32, 8, 0.05, 0.2
ADAPTERS = {"type": "lora", "rank": 4, "alpha": 16.0, "modules_to_save": ["score"]}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs, and a small causal language model with weights."""
    directory = tmp_path_factory.mktemp("reward")
    write_pairs(directory / "pairs", vocab_size=VOCAB_SIZE, longest=LENGTH)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=SPREAD,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(directory / "base")
    return directory


def run_of(root: Path, *, adapted: bool = False, **sections: Any) -> dict[str, Any]:
    """Run whose step is two micro-batches on each of two ranks."""
    return {
        "model": {"path": str(root / "base")},
        "objective": {"type": "reward", "center_rewards_coefficient": CENTERING},
        **({"adapters": ADAPTERS} if adapted else {}),
        "data": {"path": str(root / "pairs"), "allow_other_tokenizer": True},
        "batch": {"sequence_length": LENGTH, "global_batch_size": 8, "micro_batch_size": 2},
        "train": {"steps": STEPS},
        "optimizer": {"lr": 3e-3, "weight_decay": 0.1, "clip_norm": 1.0},
        "schedule": {"type": "constant"},
        "precision": {"dtype": "float32"},
        "logging": {"every_steps": 1},
        "evaluation": {"every_steps": 4, "samples": 7},  # the last batch of two ranks is padded
        "checkpoint": {"every_steps": 4},
        "output": {"directory": str(root / "run"), "export": False},
        **sections,
    }


def plain_model(root: Path) -> Any:
    """Base with a head as a run draws it: by Llama's rule, from a stream of the head's name."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(
        root / "base", dtype=torch.float32, num_labels=1, pad_token_id=0
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed_of(0, "score"))
        model.score.weight.normal_(0.0, SPREAD)
    return model


@cache
def answers_by_position(path: Path) -> dict[tuple[int, ...], tuple[str, int]]:
    """Split and number of each document, by its tokens, from the files."""
    dataset = open_dataset(path)
    found = {}
    for split in ("train", "held_out"):
        documents = [s.document(n) for s in dataset.shards(split) for n in range(s.num_documents)]
        found |= {tuple(one.tolist()): (split, number) for number, one in enumerate(documents)}
    return found


def plain_loss(root: Path, model: Any, parts: list[Any]) -> tuple[torch.Tensor, dict[str, float]]:
    """Mean loss over the pairs of `parts`, each answer in a forward pass of its own without
    padding; and metrics. Formulas of TRL 1.16 (reward_trainer.py)."""
    positions = answers_by_position(root / "pairs")
    scores = []
    for part in parts:
        for ids, labels in zip(part.input_ids, part.labels, strict=True):
            if len(answer := ids[: (labels != -100).sum()]):
                scores.append((positions[tuple(answer.tolist())], answer))
    chosen, rejected = scores[0::2], scores[1::2]
    for (split, number), (other_split, other) in zip(
        (place for place, _ in chosen), (place for place, _ in rejected), strict=True
    ):
        assert (split, number + 1, number % 2) == (other_split, other, 0)
    high, low = (
        torch.stack([model(input_ids=one[None], use_cache=False).logits[0, 0] for _, one in side])
        for side in (chosen, rejected)
    )
    loss = -logsigmoid(high - low).mean() + CENTERING * ((high + low) ** 2).mean()
    metrics = {
        "rewards/chosen": high.mean(),
        "rewards/rejected": low.mean(),
        "rewards/margins": (high - low).mean(),
        "rewards/accuracies": (high > low).float().mean(),
    }
    return loss, {name: float(value.detach()) for name, value in metrics.items()}


@cache
def plain_run(
    root: Path, adapted: bool = False
) -> tuple[list[dict[str, Any]], list[float], dict[str, Any]]:
    """Loss, norm and metrics of every step, held-out losses, the trained weights."""
    config = parse_run_config(run_of(root, adapted=adapted))
    model = plain_model(root)
    if config.adapters is not None:
        model = with_adapters(model, config.adapters, config.seed)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    section = config.optimizer
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": section.weight_decay},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, section.lr, tuple(section.betas), section.eps)
    plan, _ = plan_batch(config.batch, 1)
    assert plan is not None
    plan = replace(plan, rows_per_sample=2)
    batches = open_training_data(config, plan, 0)
    (held_out,) = open_held_out(config, plan, 0)
    rows, evaluated = [], []
    for step in range(STEPS):
        loss, metrics = plain_loss(root, model, batches.step(8 * step))
        optimizer.zero_grad()
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(trained, 1.0))
        optimizer.step()
        rows.append({"loss": float(loss.detach()), "grad_norm": norm, "recorded": metrics})
        if (step + 1) % 4 == 0:
            with torch.no_grad():
                evaluated.append(float(plain_loss(root, model, [*held_out.batches])[0]))
    batches.close()
    return rows, evaluated, model.state_dict()


def train(root: Path, name: str, tree: dict[str, Any], world_size: int) -> list[dict[str, Any]]:
    output = {"export": False, **tree["output"], "directory": str(root / name)}
    tree = {**tree, "output": output}
    path = root / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    codes, printed = shared_server().live(["--config", str(path)], world_size=world_size)
    assert codes == [0] * world_size, printed[-6000:]
    lines = (root / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def compare(root: Path, name: str, found: list[dict[str, Any]], adapted: bool = False) -> None:
    """Compare a run with the plain one."""
    expected, evaluated, weights = plain_run(root, adapted)
    rows = [row for row in found if "loss" in row]
    losses, norms = ([row[key] for row in expected] for key in ("loss", "grad_norm"))
    assert [row["loss"] for row in rows] == pytest.approx(losses, abs=1e-5, rel=1e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx(norms, rel=1e-4)
    for row, plain in zip(rows, expected, strict=True):
        assert row["recorded"] == pytest.approx(plain["recorded"], abs=1e-5, rel=1e-5)
    held_out = [row["held_out_loss"] for row in found if "held_out_loss" in row]
    assert held_out == pytest.approx(evaluated, abs=1e-5, rel=1e-5)
    trained = bigtrain.load_state_dict(root / name)
    if adapted:
        trained = {k: v for k, v in trained.items() if "lora_" in k or "modules_to_save" in k}
        assert len(trained) >= 9
    else:
        assert "score.weight" in trained
    for key, tensor in trained.items():
        torch.testing.assert_close(tensor, weights[key], atol=1e-5, rtol=1e-5)


def test_the_plain_run_learns(root: Path) -> None:
    rows, _, weights = plain_run(root)
    assert rows[-1]["loss"] < rows[0]["loss"]
    moved = weights["score.weight"] - plain_model(root).score.weight.detach()
    assert float(moved.abs().max()) > 1e-2


@pytest.mark.parametrize(
    ("engine", "sections"),
    [
        pytest.param("zero0", {}, marks=SLOW),
        pytest.param("zero1", {}, marks=SLOW),
        pytest.param("zero2", {"model": {"gradient_checkpointing": "full"}}, marks=SLOW),
        ("zero3", {}),
        pytest.param("zero1", {"parallel": {"tensor": 2}}, marks=SLOW),
    ],
    ids=["zero0", "zero1", "recomputed", "zero3", "tensor"],
)
def test_a_reward_model_is_that_of_a_plain_loop(
    root: Path, engine: str, sections: dict[str, Any]
) -> None:
    tree = run_of(root, engine={"deepspeed_config": engine}, **sections)
    tree["model"] = {"path": str(root / "base"), **tree["model"]}
    name = "-".join([engine, *sections])
    compare(root, name, train(root, name, tree, 2))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero1", "zero3"])
def test_adapters_with_a_trained_head_are_those_of_a_plain_loop(root: Path, engine: str) -> None:
    tree = run_of(root, adapted=True, engine={"deepspeed_config": engine})
    name = f"adapted-{engine}"
    compare(root, name, train(root, name, tree, 2), adapted=True)


@pytest.mark.slow
def test_a_resume_on_one_rank_continues_as_the_plain_loop(root: Path) -> None:
    tree = run_of(root, engine={"deepspeed_config": "zero1"})
    rows = train(root, "resumed", {**tree, "train": {"steps": 4}}, 2)
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4]
    allowed = {"every_steps": 4, "allow_changes": ["train.steps"]}
    compare(root, "resumed", train(root, "resumed", {**tree, "checkpoint": allowed}, 1))
