"""Weights of the losses of tokens in items of user code, map-style and from a stream, against plain
transformers and PyTorch in one process."""

from __future__ import annotations

from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from bigtrain.data.loading.loader import open_held_out, open_training_data
from bigtrain.settings.batch_plan import plan_batch
from bigtrain.settings.loading import parse_run_config
from tests.parity import objective_runs
from tests.parity.objective_runs import VOCAB_SIZE, degrees_name, save_llama, steps_of
from tests.support.datasets import write_dataset
from tests.support.streams import Shuffled, item_of

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

LENGTH, STEPS, SAMPLES = 16, 10, 8
SETTINGS = {"length": LENGTH, "weights": "fractions"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("weights")
    write_dataset(directory / "shards", vocab_size=VOCAB_SIZE)
    save_llama(directory / "base")
    return directory


def run_of(root: Path, kind: str, **sections: Any) -> dict[str, Any]:
    samples = {"type": f"tests.support.streams:{kind}", "settings": SETTINGS}
    return {
        "model": {"path": str(root / "base")},
        "data": {
            "path": str(root / "shards"),
            "samples": samples,
            "allow_other_tokenizer": True,
        },
        "batch": {"sequence_length": LENGTH, "global_batch_size": SAMPLES, "micro_batch_size": 2},
        "train": {"steps": STEPS},
        "optimizer": {"lr": 3e-3, "weight_decay": 0.0, "clip_norm": 1.0},
        "schedule": {"type": "constant"},
        "precision": {"dtype": "float32"},
        "logging": {"every_steps": 1},
        "evaluation": {"every_steps": STEPS, "samples": 6},
        "checkpoint": {"every_steps": STEPS},
        "output": {"directory": str(root / "run"), "export": False},
        **sections,
    }


def items_of(root: Path, kind: str) -> list[dict[str, Any]]:
    """Return the items of all steps, in the order in which a run reads them."""
    if kind == "Shuffled":
        return list(islice(Shuffled(**SETTINGS), STEPS * SAMPLES))
    config = parse_run_config(run_of(root, kind))
    plan, _ = plan_batch(config.batch, 1)
    assert plan is not None
    batches = open_training_data(config, plan, 0)
    numbers = batches.order.windows(0, STEPS * SAMPLES).tolist()
    batches.close()
    return [item_of(number, **SETTINGS) for number in numbers]


def weighted_loss(model: Any, items: list[dict[str, Any]]) -> torch.Tensor:
    """Return the mean of the losses of the targets of all items by their weights."""
    total, divisor = torch.zeros(()), 0.0
    for item in items:
        ids = torch.tensor([item["input_ids"]])
        targets = torch.tensor(item["labels"][1:])
        weights = torch.tensor(item["loss_weights"][1:]) * (targets != -100)
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        losses = F.cross_entropy(logits, targets, reduction="none", ignore_index=-100)
        total = total + (losses * weights).sum()
        divisor += float(weights.double().sum())
    return total / divisor


@cache
def plain_run(root: Path, kind: str) -> tuple[list[float], list[float], float]:
    """Return losses, norms of gradients, and the held-out loss after all steps."""
    model: Any = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
    config = parse_run_config(run_of(root, kind))
    section = config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), section.lr, tuple(section.betas), section.eps, weight_decay=0.0
    )
    items, losses, norms = items_of(root, kind), [], []
    for step in range(STEPS):
        loss = weighted_loss(model, items[step * SAMPLES : (step + 1) * SAMPLES])
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        losses.append(float(loss.detach()))
    plan, _ = plan_batch(config.batch, 1)
    assert plan is not None
    [source] = open_held_out(config, plan, 0)
    total, count = 0.0, 0
    for batch in source.batches:
        with torch.no_grad():
            logits = model(input_ids=batch.input_ids, use_cache=False).logits.float()
        total += float(
            F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
        )
        count += int((batch.labels != -100).sum())
    return losses, norms, total / count


@pytest.mark.parametrize(
    ("kind", "engine", "loss", "sections"),
    [
        ("Shuffled", "zero2", "chunked", {}),
        ("Items", "zero3", "plain", {}),
        ("Items", "zero1", "chunked", {"parallel": {"tensor": 2}}),
        ("Items", "zero1", "plain", {"parallel": {"pipeline": 2}}),
        ("Items", "zero1", "chunked", {"parallel": {"sequence": 2}}),
        ("Shuffled", "zero3", "plain", {}),
        ("Shuffled", "zero1", "plain", {"parallel": {"tensor": 2}}),
        ("Shuffled", "zero1", "chunked", {"parallel": {"pipeline": 2}}),
        ("Shuffled", "zero3", "chunked", {"parallel": {"sequence": 2}}),
    ],
    ids=lambda value: degrees_name(value) if isinstance(value, dict) else value,
)
def test_a_step_divides_the_weighted_losses_of_items_by_their_weights(
    root: Path, kind: str, engine: str, loss: str, sections: dict[str, Any]
) -> None:
    tree = run_of(root, kind, engine={"deepspeed_config": engine}, **sections)
    tree["model"] = {**tree["model"], "loss": loss, "loss_chunk_tokens": 7}
    name = f"{kind}-{engine}-{loss}-{degrees_name(sections)}"
    lines = objective_runs.train(root, name, tree, 2)
    losses, norms, held_out = plain_run(root, kind)
    rows = steps_of(lines)
    assert [row["loss"] for row in rows] == pytest.approx(losses, abs=1e-5, rel=1e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx(norms, rel=1e-4)
    (last,) = [line for line in lines if "held_out_loss" in line]
    assert last["held_out_loss"] == pytest.approx(held_out, abs=1e-5, rel=1e-5)
