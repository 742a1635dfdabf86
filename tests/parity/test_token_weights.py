"""Weights of the losses of tokens against plain transformers and PyTorch in one process."""

from __future__ import annotations

from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from bigtrain.data.loading.loader import open_held_out, open_training_data
from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.settings.batch_plan import plan_batch
from bigtrain.settings.loading import parse_run_config
from tests.parity import objective_runs
from tests.parity.objective_runs import VOCAB_SIZE, degrees_name, save_llama, steps_of
from tests.support.weighted import FIRST_WEIGHTED, weights_of, write_weighted

pytestmark = [pytest.mark.distributed]

LENGTH, STEPS, SAMPLES = 32, 10, 8
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset with weights, one without, and a small model."""
    directory = tmp_path_factory.mktemp("weights")
    write_weighted(directory / "weighted", low=FIRST_WEIGHTED, vocab_size=VOCAB_SIZE)
    write_weighted(directory / "plain", low=0, vocab_size=VOCAB_SIZE, seed=1)
    save_llama(directory / "base")
    return directory


def run_of(root: Path, **sections: Any) -> dict[str, Any]:
    sources = [{"path": str(root / name), "weight": 1} for name in ("weighted", "plain")]
    data = {"sources": sources, "packing": "best_fit", "allow_other_tokenizer": True}
    return {
        "model": {"path": str(root / "base")},
        "data": data,
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


def summed_losses(model: Any, batch: MicroBatch) -> tuple[torch.Tensor, float]:
    """Return the weighted sum of the losses of a batch, document by document, and that of the
    weights, which are known from the labels."""
    assert batch.position_ids is not None
    total, divisor = torch.zeros(()), 0.0
    for ids, labels, positions in zip(
        batch.input_ids, batch.labels, batch.position_ids, strict=True
    ):
        begins = (positions == 0).nonzero().flatten().tolist()
        for low, high in zip(begins, [*begins[1:], len(ids)], strict=True):
            targets = labels[low:high]
            present = targets != -100
            if not present.any():
                continue
            logits = model(input_ids=ids[None, low:high], use_cache=False).logits[0].float()
            losses = F.cross_entropy(logits[present], targets[present], reduction="none")
            weights = torch.from_numpy(weights_of(targets[present].numpy()))
            total = total + (losses * weights).sum()
            divisor += float(weights.double().sum())
    return total, divisor


@cache
def plain_run(root: Path) -> tuple[list[float], list[float], list[float]]:
    """Return losses, norms of gradients, and the held-out losses after all steps."""
    config = parse_run_config(run_of(root))
    model: Any = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
    section = config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), section.lr, tuple(section.betas), section.eps, weight_decay=0.0
    )
    plan, _ = plan_batch(config.batch, 1)
    assert plan is not None
    batches = open_training_data(config, plan, 0)
    losses, norms, seen = [], [], set()
    for step in range(STEPS):
        parts = [summed_losses(model, part) for part in batches.step(SAMPLES * step)]
        loss = torch.stack([total for total, _ in parts]).sum() / sum(count for _, count in parts)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        losses.append(float(loss.detach()))
        seen |= {float(count) for _, count in parts}
    batches.close()
    assert any(count != int(count) for count in seen)
    held_out = []
    for source in open_held_out(config, plan, 0):
        with torch.no_grad():
            parts = [summed_losses(model, batch) for batch in source.batches]
        held_out.append(sum(float(total) for total, _ in parts) / sum(count for _, count in parts))
    return losses, norms, held_out


def num_ranks(parallel: dict[str, Any]) -> int:
    degrees = [prod(d.values()) if isinstance(d, dict) else d for d in parallel.values()]
    return max(2, prod(degrees))


@pytest.mark.parametrize(
    ("engine", "loss", "sections"),
    [
        ("zero3", "chunked", {}),
        ("zero1", "plain", {"parallel": {"pipeline": 2}}),
        pytest.param("zero0", "plain", {}, marks=SLOW),
        pytest.param("zero1", "chunked", {}, marks=SLOW),
        pytest.param("zero3", "plain", {}, marks=SLOW),
        pytest.param("zero1", "chunked", {"parallel": {"tensor": 2}}, marks=SLOW),
        pytest.param("zero1", "plain", {"parallel": {"tensor": 2}}, marks=SLOW),
        pytest.param("zero1", "chunked", {"parallel": {"pipeline": 2}}, marks=SLOW),
        pytest.param("zero1", "chunked", {"parallel": {"sequence": 2}}, marks=SLOW),
        pytest.param("zero3", "plain", {"parallel": {"sequence": 2}}, marks=SLOW),
        pytest.param("zero1", "plain", {"parallel": {"sequence": {"ring": 2}}}, marks=SLOW),
        pytest.param("zero0", "chunked", {"parallel": {"tensor": 2, "pipeline": 2}}, marks=SLOW),
    ],
    ids=lambda value: degrees_name(value) if isinstance(value, dict) else value,
)
def test_a_step_divides_the_weighted_losses_by_their_weights(
    root: Path, engine: str, loss: str, sections: dict[str, Any]
) -> None:
    tree = run_of(root, engine={"deepspeed_config": engine}, **sections)
    tree["model"] = {**tree["model"], "loss": loss, "loss_chunk_tokens": 7}
    name = f"{engine}-{loss}-{degrees_name(sections)}"
    lines = objective_runs.train(root, name, tree, num_ranks(sections.get("parallel", {})))
    losses, norms, held_out = plain_run(root)
    rows = steps_of(lines)
    assert [row["loss"] for row in rows] == pytest.approx(losses, abs=1e-5, rel=1e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx(norms, rel=1e-4)
    assert losses[-1] < losses[0]
    print(lines[-1], lines[-2], held_out)
    (last,) = [line for line in lines if "held_out_loss" in line]
    assert last["held_out_loss"] == pytest.approx(float(np.mean(held_out)), abs=1e-5, rel=1e-5)
