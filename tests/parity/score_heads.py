"""Plain training of models with a score head, and comparison of runs with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import bigtrain
from bigtrain.data.loading.loader import open_held_out, open_training_data
from bigtrain.data.shards.dataset import open_dataset
from bigtrain.models.layers.parameters import seed_of
from bigtrain.parity.adapters import with_adapters
from bigtrain.settings.batch_plan import plan_batch
from bigtrain.settings.loading import parse_run_config
from tests.parity.objective_runs import SPREAD

LENGTH, STEPS = 32, 8
ADAPTERS = {"type": "lora", "rank": 4, "alpha": 16.0, "modules_to_save": ["score"]}


def run_of(
    root: Path, data: Path, objective: dict[str, Any], *, adapted: bool = False, **sections: Any
) -> dict[str, Any]:
    """Return a run whose step is two micro-batches on each of two ranks."""
    return {
        "model": {"path": str(root / "base")},
        "objective": objective,
        **({"adapters": ADAPTERS} if adapted else {}),
        "data": {"path": str(data), "allow_other_tokenizer": True},
        "batch": {"sequence_length": LENGTH, "global_batch_size": 8, "micro_batch_size": 2},
        "train": {"steps": STEPS},
        # With the default eps a gradient of 1e-8 moves a weight as far as one of 1, and so does its
        # rounding.
        "optimizer": {"lr": 3e-3, "weight_decay": 0.1, "clip_norm": 1.0, "eps": 1e-5},
        "schedule": {"type": "constant"},
        "precision": {"dtype": "float32"},
        "logging": {"every_steps": 1},
        "evaluation": {"every_steps": 4, "samples": 7},  # the last batch of two ranks is padded
        "checkpoint": {"every_steps": 4},
        "output": {"directory": str(root / "run"), "export": False},
        **sections,
    }


def plain_model(root: Path, num_labels: int, padding: int = 0) -> Any:
    """Return the base with a head as a run draws it: by Llama's rule, from a stream of the head's
    name. padding: token that pads, which documents contain, too: its embedding is trained."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(
        root / "base", dtype=torch.float32, num_labels=num_labels, pad_token_id=padding
    )
    model.get_input_embeddings().padding_idx = None
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed_of(0, "score"))
        model.score.weight.normal_(0.0, SPREAD)
    return model


def places_of(path: Path) -> dict[tuple[int, ...], tuple[str, int]]:
    """Return split and number of each document, by its tokens, from the files."""
    dataset = open_dataset(path)
    places_by_tokens = {}
    for split in ("train", "held_out"):
        documents = [s.document(n) for s in dataset.shards(split) for n in range(s.num_documents)]
        places_by_tokens |= {
            tuple(one.tolist()): (split, number) for number, one in enumerate(documents)
        }
    return places_by_tokens


def documents_in(parts: list[Any]) -> list[torch.Tensor]:
    """Return the tokens of the rows of micro-batches, without padding."""
    rows = [pair for part in parts for pair in zip(part.input_ids, part.labels, strict=True)]
    documents = [ids[: (labels != -100).sum()] for ids, labels in rows]
    return [one for one in documents if len(one)]


def scores_of(model: Any, documents: list[torch.Tensor]) -> torch.Tensor:
    """Return scores [documents, labels], each of a forward pass without padding."""
    return torch.cat([model(input_ids=one[None], use_cache=False).logits for one in documents])


@dataclass(frozen=True)
class Plain:
    """Loss, norm and metrics of every step, held-out losses, initial head, trained weights."""

    rows: list[dict[str, Any]]
    evaluated: list[float]
    head: torch.Tensor
    weights: dict[str, torch.Tensor]


def plain_run(
    tree: dict[str, Any],
    model: Any,
    loss_of: Callable[[Any, list[torch.Tensor]], tuple[torch.Tensor, dict[str, torch.Tensor]]],
    rows_per_sample: int,
) -> Plain:
    """Train `model` as `tree` says. `loss_of`: mean loss over documents, and metrics."""
    config, head = parse_run_config(tree), model.score.weight.detach().clone()
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
    plan = replace(plan, rows_per_sample=rows_per_sample)
    batches = open_training_data(config, plan, 0)
    (held_out,) = open_held_out(config, plan, 0)
    rows, evaluated = [], []
    for step in range(STEPS):
        loss, metrics = loss_of(model, documents_in(batches.step(8 * step)))
        optimizer.zero_grad()
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(trained, 1.0))
        optimizer.step()
        recorded = {name: float(value.detach()) for name, value in metrics.items()}
        rows.append({"loss": float(loss.detach()), "grad_norm": norm, "recorded": recorded})
        if (step + 1) % 4 == 0:
            with torch.no_grad():
                evaluated.append(float(loss_of(model, documents_in([*held_out.batches]))[0]))
    batches.close()
    return Plain(rows, evaluated, head, model.state_dict())


def compare(directory: Path, records: list[dict[str, Any]], plain: Plain) -> None:
    """Compare the run in `directory` with the plain one."""
    rows = [row for row in records if "loss" in row]
    losses, norms = ([row[key] for row in plain.rows] for key in ("loss", "grad_norm"))
    assert [row["loss"] for row in rows] == pytest.approx(losses, abs=1e-5, rel=1e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx(norms, rel=1e-4)
    for row, expected in zip(rows, plain.rows, strict=True):
        assert row["recorded"] == pytest.approx(expected["recorded"], abs=1e-5, rel=1e-5)
    held_out = [row["held_out_loss"] for row in records if "held_out_loss" in row]
    assert held_out == pytest.approx(plain.evaluated, abs=1e-5, rel=1e-5)
    trained = bigtrain.load_state_dict(directory)
    if any("lora_" in name for name in trained):
        trained = {k: v for k, v in trained.items() if "lora_" in k or "modules_to_save" in k}
        assert len(trained) >= 9
    assert any("score" in name for name in trained)
    for key, tensor in trained.items():
        torch.testing.assert_close(tensor, plain.weights[key], atol=1e-5, rtol=1e-5)
