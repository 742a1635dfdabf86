"""The same numbers as a loop of plain transformers and torch.optim.AdamW in one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from bigtrain.data.packing import PackedWindows, split_stream
from bigtrain.data.sampling import SampleOrder
from bigtrain.data.shards import open_dataset
from tests.parity.conftest import STEPS, Case, matrix, run_config
from tests.support.datasets import END_OF_DOCUMENT

# The whole matrix is trained in the first test's set-up: minutes on two busy cores.
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

LOSS = {"float32": 1e-5, "bfloat16": 2e-3}
NORM = {"float32": 1e-4, "bfloat16": 1e-2}


def masked_loss(model: Any, rows: torch.Tensor) -> torch.Tensor:
    """Mean loss in nats of samples [S, T + 1], none for what follows an end of document."""
    inputs, labels = rows[:, :-1], rows[:, 1:].clone()
    labels[inputs == END_OF_DOCUMENT] = -100
    logits = model(input_ids=inputs, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def plain_training(
    data: Path,
    hf_directory: Path,
    config: dict[str, Any],
    loss_of: Callable[[Any, torch.Tensor], torch.Tensor] = masked_loss,
) -> dict[str, Any]:
    """Train with nothing of bigtrain but the stored tokens and which sample comes when."""
    model = AutoModelForCausalLM.from_pretrained(hf_directory, dtype=torch.float32)
    model.train()
    decay = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": decay, "weight_decay": config["optimizer"].get("weight_decay", 0.1)},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=config["optimizer"]["lr"],
        betas=(0.9, 0.95),
        eps=config["optimizer"].get("eps", 1e-8),
    )
    length = config["batch"]["sequence_length"]
    num_samples = config["batch"]["global_samples"]
    windows = PackedWindows(split_stream(open_dataset(data), "train"), length)
    order = SampleOrder(windows.num_samples, config["seed"])
    losses, norms = [], []
    warmup = config["schedule"]["warmup_steps"]
    for step in range(STEPS):
        rows = torch.zeros((num_samples, length + 1), dtype=torch.int64)
        for row, window in enumerate(order.windows(step * num_samples, num_samples)):
            windows.read_into(int(window), rows[row].numpy())
        loss = loss_of(model, rows)
        loss.backward()
        limit = config["optimizer"]["clip_norm"] or math.inf
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)))
        rate = (
            (step + 1) / warmup
            if step < warmup
            else 0.1 + 0.45 * (1 + math.cos(math.pi * (step + 1 - warmup) / (STEPS - warmup)))
        )
        for group in optimizer.param_groups:
            group["lr"] = config["optimizer"]["lr"] * rate
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "weights": weights}


@pytest.fixture(scope="module")
def references(dataset: Path, hf_directories: dict[str, Path]) -> dict[str, Any]:
    """The plain loop's figures by architecture."""
    config = run_config(dataset, {}, micro_samples=8)
    return {
        name: plain_training(dataset, directory, config)
        for name, directory in hf_directories.items()
    }


def test_reference_learns_and_clips(references: dict[str, Any]) -> None:
    reference = references["llama"]
    assert reference["losses"][-1] < reference["losses"][0] - 0.3
    assert min(reference["norms"]) > 0.5


@pytest.mark.parametrize("case", matrix(), ids=lambda case: case.name)
def test_equals_plain_training(
    case: Case, references: dict[str, Any], results: dict[str, Any]
) -> None:
    reference, result = references[case.architecture], results[case.name]
    assert result["accumulation"] == case.accumulation
    for step in range(STEPS):
        loss, norm = reference["losses"][step], reference["norms"][step]
        assert result["losses"][step] == pytest.approx(loss, abs=LOSS[case.dtype]), step
        assert result["norms"][step] == pytest.approx(norm, rel=NORM[case.dtype]), step
