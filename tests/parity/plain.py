"""Plain transformers and torch.optim.AdamW in one process: what the matrix is compared with.

Of bigtrain there is only which sample comes when; tokens and masks are read from the files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from bigtrain.data.sampling import SampleOrder
from tests.support.datasets import END_OF_DOCUMENT

IGNORED = -100
Chunks = Callable[[int], list[torch.Tensor]]
"""From a step to the samples of each of its micro-batches."""


@dataclass(frozen=True)
class Step:
    """The samples of a step: token ids [S, T], labels [S, T], positions in documents or None."""

    inputs: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor | None


def read_steps(data: Path, config: dict[str, Any]) -> list[Step]:
    """Every step of a run, cut from the one shard of `data` (uint16 tokens, a bit mask)."""
    length, size = config["batch"]["sequence_length"], config["batch"]["global_samples"]
    tokens = np.fromfile(data / "train_00000.bin", np.uint16).astype(np.int64)
    mask = None
    if (file := data / "train_00000.mask").exists():
        mask = np.unpackbits(np.fromfile(file, np.uint8), bitorder="little", count=len(tokens))
    isolate = config["data"].get("document_boundaries") == "isolate"
    order = SampleOrder((len(tokens) - 1) // length, config["seed"])
    steps = []
    for step in range(config["train"]["steps"]):
        starts = order.windows(step * size, size) * length
        rows = torch.from_numpy(tokens[starts[:, None] + np.arange(length + 1)])
        inputs, labels, positions = rows[:, :-1], rows[:, 1:].clone(), None
        if mask is not None:
            wanted = mask[starts[:, None] + np.arange(1, length + 1)]
            labels[torch.from_numpy(wanted == 0)] = IGNORED
        if isolate:
            labels[inputs == END_OF_DOCUMENT] = IGNORED
            positions = torch.stack([_positions(row) for row in inputs])
        steps.append(Step(inputs, labels, positions))
    return steps


def _positions(row: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.arange(high - low) for low, high in pairwise(_bounds(row))])


def _bounds(row: torch.Tensor) -> list[int]:
    """Where the documents of a sample begin, and its end."""
    begins = (torch.nonzero(row == END_OF_DOCUMENT).flatten() + 1).tolist()
    return sorted({0, *begins, len(row)})


def summed_loss(model: Any, step: Step, samples: torch.Tensor, *, separate: bool) -> torch.Tensor:
    """Cross-entropy in nats summed over the targets of `samples` of a step.

    separate: every document in a forward pass of its own.
    """
    inputs, labels = step.inputs[samples], step.labels[samples]
    if step.positions is None or not separate:
        positions = None if step.positions is None else step.positions[samples]
        logits = model(input_ids=inputs, position_ids=positions, use_cache=False).logits
        return _cross_entropy(logits.flatten(0, 1), labels.flatten())
    total = torch.zeros(())
    for row, targets in zip(inputs, labels, strict=True):
        for low, high in pairwise(_bounds(row)):
            logits = model(input_ids=row[None, low:high], use_cache=False).logits[0]
            total = total + _cross_entropy(logits, targets[low:high])
    return total


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")


def whole(_step: int) -> list[torch.Tensor]:
    """A step's 8 samples at once."""
    return [torch.arange(8)]


def permuted(micro_samples: int, seed: int) -> Chunks:
    """A step's 8 samples in another order, `micro_samples` at a time."""

    def chunks(step: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * seed + step)
        return list(torch.randperm(8, generator=generator).split(micro_samples))

    return chunks


@dataclass(frozen=True)
class Training:
    """Figures of a run, by step; weights after the steps that were asked for."""

    losses: list[float]
    norms: list[float]
    weights: dict[int, dict[str, torch.Tensor]]


def train(
    hf_directory: Path,
    steps: list[Step],
    config: dict[str, Any],
    *,
    num_steps: int,
    chunks: Chunks = whole,
    dtype: torch.dtype = torch.float32,
    sum_dtype: torch.dtype = torch.float32,
) -> Training:
    """Train from `hf_directory`; masters are float32 whatever `dtype` the model computes in.

    sum_dtype: in which the gradients of micro-batches are added up. The loss is the mean over the
    targets of a step.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(hf_directory, dtype=dtype).train()
    parameters = dict(model.named_parameters())
    masters = {name: p.detach().float().clone() for name, p in parameters.items()}
    optimizer = _optimizer(list(masters.values()), config["optimizer"])
    found = Training([], [], {})
    for number in range(num_steps):
        step = steps[number]
        num_targets = int((step.labels != IGNORED).sum())
        sums = {name: torch.zeros_like(p, dtype=sum_dtype) for name, p in parameters.items()}
        total = 0.0
        for samples in chunks(number):
            # Separate documents are the more independent reference, and in 16 bit a coarser one
            # than packed ones: the gradient of a weight is rounded once for each.
            loss = summed_loss(model, step, samples, separate=dtype == torch.float32)
            (loss / num_targets).backward()
            total += float(loss.detach())
            for name, parameter in parameters.items():
                sums[name] += parameter.grad.to(sum_dtype)
                parameter.grad = None
        for name, master in masters.items():
            master.grad = sums[name].float()
        limit = config["optimizer"]["clip_norm"]
        found.norms.append(float(torch.nn.utils.clip_grad_norm_(masters.values(), limit)))
        found.losses.append(total / num_targets)
        for group in optimizer.param_groups:
            group["lr"] = _rate(number, config)
        optimizer.step()
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(masters[name])
    found.weights[num_steps] = masters
    return found


def _optimizer(masters: list[torch.Tensor], section: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [
            {"params": [p for p in masters if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in masters if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=section["lr"],
        betas=(0.9, 0.95),
        eps=section["eps"],
    )


def _rate(step: int, config: dict[str, Any]) -> float:
    """The learning rate of a cosine schedule with warm-up to a tenth of the peak."""
    peak, warmup = config["optimizer"]["lr"], config["schedule"]["warmup_steps"]
    if step < warmup:
        return float(peak * (step + 1) / warmup)
    done = (step + 1 - warmup) / (config["train"]["steps"] - warmup)
    return float(peak * (0.1 + 0.45 * (1 + math.cos(math.pi * done))))


@dataclass(frozen=True)
class Spread:
    """How far runs of one training in 16 bit are apart that only add up in other orders.

    losses, norms: the means over the runs, by step. loss, norm, weight: of the run farthest from
    them, the largest distance at any step: in nats, of the norm, and the root mean square over
    all weights at the end.
    """

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    loss: float
    norm: float
    weight: float

    @classmethod
    def of(cls, runs: list[Training], num_steps: int) -> Spread:
        losses = np.array([run.losses for run in runs])
        norms = np.array([run.norms for run in runs])
        ends = [run.weights[num_steps] for run in runs]
        centre = {name: torch.stack([e[name] for e in ends]).mean(0) for name in ends[0]}
        return cls(
            losses.mean(0).tolist(),
            norms.mean(0).tolist(),
            centre,
            float(np.abs(losses - losses.mean(0)).max()),
            float((np.abs(norms - norms.mean(0)) / norms.mean(0)).max()),
            max(root_mean_square(end, centre) for end in ends),
        )


def root_mean_square(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Of the differences of all weights."""
    squares = [(found[name] - weight).double().square() for name, weight in expected.items()]
    return math.sqrt(sum(float(s.sum()) for s in squares) / sum(s.numel() for s in squares))


def orders() -> Iterator[Chunks]:
    """The same 8 samples in other orders and divisions."""
    yield whole
    yield permuted(4, 1)
    yield permuted(2, 2)
    yield permuted(1, 3)
