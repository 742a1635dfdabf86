"""Small models and runs of the tests of objectives, their plain training in one process, and the
comparison of both."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import bigtrain
from bigtrain.data.loading.loader import open_held_out, open_training_data
from bigtrain.metrics.recording import record
from bigtrain.parity.adapters import with_adapters
from bigtrain.settings.batch_plan import plan_batch
from bigtrain.settings.loading import parse_run_config
from tests.support.lives import shared_server

VOCAB_SIZE = 96
SPREAD = 0.2
COMMON = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
COMMON += ("num_key_value_heads", "max_position_embeddings", "initializer_range", "eos_token_id")
ADAPTERS = {"type": "lora", "rank": 4, "alpha": 16.0}
IGNORED = -100


# -- Models ----------------------------------------------------------------------------------------


def save_llama(
    directory: Path, *, hidden_size: int = 32, seed: int = 0, spread: float = SPREAD, **changes: Any
) -> None:
    """Save a random causal language model."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": hidden_size,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "initializer_range": spread,
            "bos_token_id": None,
            "eos_token_id": 0,
            **changes,
        }
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def save_experts(base: Path, directory: Path) -> None:
    """Save a random model with experts, of the sizes of the Llama in `base`."""
    config = LlamaConfig.from_pretrained(base).to_dict()
    common = {name: value for name, value in config.items() if name in COMMON}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **experts, head_dim=8)).save_pretrained(directory)


# -- Runs ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """DeepSpeed's JSON, degrees and ranks: two, or those of one copy of the model."""

    engine: str
    parallel: dict[str, Any] = field(default_factory=dict)
    replicas: int = 1

    @property
    def world_size(self) -> int:
        axes = {axis: size for axis, size in self.parallel.items() if axis != "expert"}
        degrees = [prod(d.values()) if isinstance(d, dict) else d for d in axes.values()]
        return max(2, self.replicas * prod(degrees))

    @property
    def sections(self) -> dict[str, Any]:
        return {"engine": {"deepspeed_config": self.engine}, "parallel": self.parallel}


LAYOUTS = {
    "zero0": Layout("zero0"),
    "zero1": Layout("zero1"),
    "zero2": Layout("zero2"),
    "zero3": Layout("zero3"),
    "tensor": Layout("zero1", {"tensor": 2}),
    "sequence": Layout("zero1", {"sequence": 2}),
    "zero3 sequence": Layout("zero3", {"sequence": 2}),
    "ring": Layout("zero3", {"sequence": {"ring": 2}}),
    "zero1 ring": Layout("zero1", {"sequence": {"ring": 2}}),
    "both sequences": Layout("zero1", {"sequence": {"ulysses": 2, "ring": 2}}),
    "stages": Layout("zero1", {"pipeline": 2}),
    "data stages": Layout("zero0", {"pipeline": 2}, replicas=2),
    "tensor stages": Layout("zero0", {"tensor": 2, "pipeline": 2}),
    "tensor sequence": Layout("zero3", {"tensor": 2, "sequence": 2}),
    "experts": Layout("zero1", {"expert": 2}),
    "zero3 experts": Layout("zero3", {"expert": 2}),
}


def each_layout(fast: Sequence[str], slow: Sequence[str]) -> pytest.MarkDecorator:
    """Return a decorator that runs a test with the names of layouts in turn."""
    parameters = [*fast, *(pytest.param(name, marks=pytest.mark.slow) for name in slow)]
    return pytest.mark.parametrize("name", parameters)


def run_tree(
    root: Path, *, length: int, steps: int, samples: int = 8, **sections: Any
) -> dict[str, Any]:
    """Return a run of ``root / "base"`` whose step is two micro-batches on each of two ranks."""
    micro = max(1, samples // 4)
    batch = {"sequence_length": length, "global_batch_size": samples, "micro_batch_size": micro}
    return {
        "model": {"path": str(root / "base")},
        "batch": batch,
        "train": {"steps": steps},
        # With the default eps a gradient of 1e-8 moves a weight as far as one of 1, and so does its
        # rounding.
        "optimizer": {"lr": 3e-3, "weight_decay": 0.0, "clip_norm": 1.0, "eps": 1e-5},
        "schedule": {"type": "constant"},
        "precision": {"dtype": "float32"},
        "logging": {"every_steps": 1},
        "checkpoint": {"every_steps": steps // 2},
        "output": {"directory": str(root / "run"), "export": False},
        **sections,
    }


def train(root: Path, name: str, tree: dict[str, Any], world_size: int) -> list[dict[str, Any]]:
    """Train `tree` in a world of processes; return the lines of its metrics."""
    tree = {**tree, "output": {"directory": str(root / name), "export": False}}
    path = root / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    codes, printed = shared_server().live(["--config", str(path)], world_size=world_size)
    assert codes == [0] * world_size, printed[-6000:]
    lines = (root / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def train_in_two(
    root: Path,
    name: str,
    tree: dict[str, Any],
    world_size: int = 2,
    then: dict[str, Any] | None = None,
    then_size: int = 1,
) -> list[dict[str, Any]]:
    """Train half of the steps, and resume on other ranks: one, or with the degrees `then`."""
    stop = tree["train"]["steps"] // 2
    lines = train(root, name, {**tree, "train": {"steps": stop}}, world_size)
    assert [row["step"] for row in steps_of(lines)] == list(range(1, stop + 1))
    checkpoint = {**tree["checkpoint"], "allow_changes": ["train.steps"]}
    more = {"checkpoint": checkpoint, "parallel": then or {}}
    return train(root, name, {**tree, **more}, then_size)


def steps_of(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines of logged steps."""
    return [line for line in lines if "loss" in line]


# -- Plain training --------------------------------------------------------------------------------

LossOf = Callable[[Any, list[Any]], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""Mean loss over micro-batches, and metrics, by a model."""


@dataclass(frozen=True)
class Plain:
    """Loss, norm and metrics of every step, held-out losses and metrics, trained weights."""

    rows: list[dict[str, Any]]
    evaluated: list[float]
    weights: dict[str, torch.Tensor]
    evaluated_metrics: list[dict[str, float]]

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows]


def read_steps(tree: dict[str, Any], rows_per_sample: int = 1) -> list[list[Any]]:
    """Return the micro-batches of every step, in one process."""
    config = parse_run_config(tree)
    plan, _ = plan_batch(config.batch, 1)
    assert plan is not None
    batches = open_training_data(config, replace(plan, rows_per_sample=rows_per_sample), 0)
    size = config.batch.samples_per_step
    steps = [list(batches.step(size * step)) for step in range(config.train.total_steps)]
    batches.close()
    return steps


def plain_training(
    tree: dict[str, Any],
    model: Any,
    loss_of: LossOf,
    *,
    rows_per_sample: int = 1,
    steps: Sequence[Any] | None = None,
    evaluate: LossOf | None = None,
) -> Plain:
    """Train `model` with AdamW as `tree` says. `steps`: micro-batches of each, if other than the
    run's own; `evaluate`: instead of `loss_of`."""
    config = parse_run_config(tree)
    if config.adapters is not None:
        model = with_adapters(model, config.adapters, config.seed)
    trained = [parameter for parameter in model.train().parameters() if parameter.requires_grad]
    section = config.optimizer
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": section.weight_decay},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, section.lr, tuple(section.betas), section.eps)
    plan, _ = plan_batch(config.batch, 1)
    assert plan is not None
    plan = replace(plan, rows_per_sample=rows_per_sample)
    every = config.evaluation.every_steps
    rows, evaluated = [], []
    evaluated_metrics: list[dict[str, float]] = []
    for number, parts in enumerate(steps or read_steps(tree, rows_per_sample), 1):
        loss, metrics = loss_of(model, parts)
        optimizer.zero_grad()
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(trained, section.clip_norm))
        optimizer.step()
        recorded = {name: float(value.detach()) for name, value in metrics.items()}
        rows.append({"loss": float(loss.detach()), "grad_norm": norm, "recorded": recorded})
        if every and number % every == 0:
            with torch.no_grad():
                held_out = [
                    (evaluate or loss_of)(model, [*source.batches])
                    for source in open_held_out(config, plan, 0)
                ]
            evaluated.append(float(sum(loss for loss, _ in held_out)) / len(held_out))
            names = held_out[0][1]
            evaluated_metrics.append(
                {
                    name: float(sum(metrics[name] for _, metrics in held_out)) / len(held_out)
                    for name in names
                }
            )
    return Plain(rows, evaluated, model.state_dict(), evaluated_metrics)


def compare(
    directory: Path,
    lines: list[dict[str, Any]],
    plain: Plain,
    *,
    unrecorded: Sequence[str] = (),
    learns: bool = True,
) -> None:
    """Compare the run in `directory` with the plain one: losses, norms, metrics but `unrecorded`
    ones, held-out losses and trained weights."""
    rows = steps_of(lines)
    assert [row["loss"] for row in rows] == pytest.approx(plain.losses, abs=1e-5, rel=1e-5)
    # AdamW does not depend on the scale of the gradient, and the norm does.
    norms = [row["grad_norm"] for row in plain.rows]
    assert [row["grad_norm"] for row in rows] == pytest.approx(norms, rel=1e-4)
    half = len(plain.losses) // 2
    assert min(plain.losses[half:]) < plain.losses[0] or not learns
    for row, expected in zip(rows, plain.rows, strict=True):
        # Before the first update margins are 0, or what rounding leaves.
        skipped = {*unrecorded, *(("rewards/accuracies",) if row["step"] == 1 else ())}
        recorded, wanted = (
            {key: value for key, value in each.items() if key not in skipped}
            for each in (row.get("recorded") or {}, expected["recorded"])
        )
        assert recorded == pytest.approx(wanted, abs=2e-5, rel=1e-5)
    held_out = [line for line in lines if "held_out_loss" in line]
    if plain.evaluated:
        losses = [line["held_out_loss"] for line in held_out]
        assert losses == pytest.approx(plain.evaluated, abs=1e-5, rel=1e-5)
        for line, wanted in zip(held_out, plain.evaluated_metrics, strict=True):
            metrics = line.get("held_out_metrics", {})
            assert metrics.keys() - {*unrecorded} == wanted.keys()
            recorded = {name: metrics[name] for name in wanted}
            assert recorded == pytest.approx(wanted, abs=2e-5, rel=1e-5)
    trained = bigtrain.load_state_dict(directory)
    if any("lora_" in key for key in trained):
        trained = {k: v for k, v in trained.items() if "lora_" in k or "modules_to_save" in k}
    assert len(trained) >= 8
    for key, tensor in trained.items():
        torch.testing.assert_close(tensor, plain.weights[key], atol=1e-5, rtol=1e-5)


def log_probabilities(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of the targets: float32 [R, T]; 0 elsewhere."""
    logits = model(input_ids=ids, use_cache=False).logits.float()
    values = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return values * (labels != IGNORED)


def documents_in(batch: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return ids and labels of each document of a micro-batch, apart."""
    documents = []
    for ids, labels, positions in zip(
        batch.input_ids, batch.labels, batch.position_ids, strict=True
    ):
        edges = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
        documents += [(ids[low:high], labels[low:high]) for low, high in pairwise(edges)]
    return documents


class SummedPairs:
    """An objective of a user that records sums."""

    unit = "pairs"

    def loss(self, batch: Any) -> torch.Tensor:
        """Return the summed margins of the pairs."""
        record("pairs", len(batch.row_sums) // 2, "sum")
        record("chosen", batch.row_sums[0::2].sum(), "sum")
        return torch.nn.functional.softplus(batch.row_sums[1::2] - batch.row_sums[0::2]).sum()
