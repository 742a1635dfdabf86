"""Distillation from stored probabilities of a teacher, against plain transformers and PyTorch."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from transformers import AutoModelForCausalLM

import bigtrain
from bigtrain.data.loading.loader import open_training_data
from bigtrain.data.loading.stored_scores import check_reference_scores
from bigtrain.data.shards.dataset import open_sources
from bigtrain.errors import ConfigError
from bigtrain.models.layers.token_loss import divergence
from bigtrain.parity.adapters import with_adapters
from bigtrain.settings.batch_plan import plan_batch
from bigtrain.settings.loading import parse_run_config
from tests.parity import objective_runs
from tests.parity.objective_runs import VOCAB_SIZE, degrees_name, save_experts, save_llama, steps_of
from tests.support.datasets import write_dataset
from tests.support.lives import shared_server

pytestmark = [pytest.mark.distributed]

LENGTH, STEPS, TOP_K, ALPHA = 32, 10, 5, 0.7
ADAPTERS = {"type": "lora", "rank": 4, "alpha": 16.0}


@pytest.fixture(scope="module")
def unscored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two datasets, a student, and a larger teacher."""
    directory = tmp_path_factory.mktemp("distillation")
    for name, seed in (("one", 0), ("two", 1)):
        write_dataset(directory / name, vocab_size=VOCAB_SIZE, seed=seed, masked=name == "two")
    save_llama(directory / "student")
    save_experts(directory / "student", directory / "experts")
    save_llama(directory / "teacher", hidden_size=48, seed=1)
    return directory


@pytest.fixture(scope="module")
def root(unscored: Path) -> Path:
    """The same, with the teacher's scores."""
    top = ("--kind", "top-k", "--top-k", str(TOP_K), "--part-tokens", "1500")
    score(unscored, "teacher", unscored / "scores", *top)
    return unscored


def score(root: Path, model: str, output: Path, *words: str) -> None:
    tree = run_of(root) | {"model": {"path": str(root / model)}}
    path = output.with_suffix(".yaml")
    path.write_text(yaml.safe_dump({**tree, "objective": {"type": "next_token"}}))
    command = ["-m", "bigtrain.cli", "score", "--config", str(path), "--output", str(output)]
    codes, printed = shared_server().live([], world_size=1, script=[*command, *words])
    assert codes == [0], printed


def run_of(root: Path, **sections: Any) -> dict[str, Any]:
    sources = [{"path": str(root / name), "weight": 1.0} for name in ("one", "two")]
    return {
        "model": {"path": str(root / "student"), "loss": "chunked", "loss_chunk_tokens": 7},
        "objective": {
            "type": "distillation",
            "teacher": str(root / "scores"),
            "alpha": ALPHA,
        },
        "data": {"sources": sources, "packing": "best_fit"},
        "batch": {"sequence_length": LENGTH, "global_batch_size": 8, "micro_batch_size": 2},
        "train": {"steps": STEPS},
        "optimizer": {"lr": 3e-3, "weight_decay": 0.0, "clip_norm": 1.0},
        "schedule": {"type": "constant"},
        "precision": {"dtype": "float32"},
        "logging": {"every_steps": 1},
        "checkpoint": {"every_steps": STEPS // 2},
        "output": {"directory": str(root / "run"), "export": False},
        **sections,
    }


def coarse(logits: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """Probabilities of the tokens `top` [n, k], and of all others together: [n, k + 1]."""
    known = logits.softmax(-1).gather(-1, top)
    return torch.cat([known, 1 - known.sum(-1, keepdim=True)], -1)


def plain_loss(student: Any, teacher: Any, batch: Any) -> torch.Tensor:
    """Mean over the targets, each document by a forward pass of its own."""
    losses = []
    for ids, labels, positions in zip(
        batch.input_ids, batch.labels, batch.position_ids, strict=True
    ):
        edges = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
        for low, high in pairwise(edges):
            wanted = labels[low:high] != -100
            if not wanted.any():
                continue
            text, targets = ids[None, low:high], labels[low:high][wanted]
            logits = student(input_ids=text, use_cache=False).logits[0][wanted]
            with torch.no_grad():
                known = teacher(input_ids=text, use_cache=False).logits[0][wanted].double()
            top = known.topk(TOP_K).indices
            expected, probabilities = coarse(known, top), coarse(logits.double(), top)
            divergences = F.kl_div(probabilities.log(), expected, reduction="none").sum(-1)
            entropies = F.cross_entropy(logits, targets, reduction="none")
            losses.append(ALPHA * divergences + (1 - ALPHA) * entropies)
    return torch.cat(losses).mean()


@cache
def plain_run(root: Path, adapted: bool, name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    tree = run_of(root, **({"adapters": ADAPTERS} if adapted else {}))
    config = parse_run_config(tree | {"objective": {"type": "next_token"}})
    student: Any = AutoModelForCausalLM.from_pretrained(root / name, dtype=torch.float32)
    teacher = AutoModelForCausalLM.from_pretrained(root / "teacher", dtype=torch.float32).eval()
    if config.adapters is not None:
        student = with_adapters(student, config.adapters, config.seed)
    trained = [parameter for parameter in student.train().parameters() if parameter.requires_grad]
    section = config.optimizer
    optimizer = torch.optim.AdamW(
        trained, section.lr, tuple(section.betas), section.eps, weight_decay=0.0
    )
    plan, _ = plan_batch(config.batch.model_copy(update={"micro_batch_size": 8}), 1)
    assert plan is not None
    batches = open_training_data(config, plan, 0)
    losses = []
    for step in range(STEPS):
        (batch,) = batches.step(8 * step)
        loss = plain_loss(student, teacher, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    batches.close()
    return losses, student.state_dict()


def train(root: Path, name: str, tree: dict[str, Any], world_size: int) -> list[dict[str, Any]]:
    return steps_of(objective_runs.train(root, name, tree, world_size))


@pytest.mark.parametrize("loss", ["chunked", pytest.param("plain", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("engine", "sections"),
    [
        ("zero1", {}),
        pytest.param("zero3", {}, marks=pytest.mark.slow),
        pytest.param("zero1", {"parallel": {"tensor": 2}}, marks=pytest.mark.slow),
        pytest.param("zero3", {"adapters": ADAPTERS}, marks=pytest.mark.slow),
        pytest.param("zero1", {"parallel": {"sequence": 2}}, marks=pytest.mark.slow),
        pytest.param("zero1", {"parallel": {"pipeline": 2}}, marks=pytest.mark.slow),
        pytest.param("zero1", {"parallel": {"expert": 2}}, marks=pytest.mark.slow),
    ],
    ids=["zero1", "zero3", "tensor", "adapters", "sequence", "pipeline", "experts"],
)
def test_equals_a_plain_loop(root: Path, loss: str, engine: str, sections: dict[str, Any]) -> None:
    """Half of it on two ranks, the rest on one."""
    tree = run_of(root, engine={"deepspeed_config": engine}, **sections)
    tree["model"]["loss"] = loss
    student = "experts" if "expert" in sections.get("parallel", {}) else "student"
    tree["model"]["path"] = str(root / student)
    name = f"{loss}-{engine}-{student}-{degrees_name(sections)}-{'-'.join(sections)}"
    train(root, name, tree | {"train": {"steps": STEPS // 2}}, 2)
    more = {"checkpoint": {"allow_changes": ["train.steps"]}, "parallel": {}}
    rows = train(root, name, tree | more, 1)
    losses, weights = plain_run(root, "adapters" in sections, student)
    assert [row["loss"] for row in rows] == pytest.approx(losses, abs=1e-5, rel=1e-5)
    assert losses[-1] < losses[0]
    if "adapters" not in sections:
        trained = bigtrain.load_state_dict(root / name)
        for key, tensor in trained.items():
            torch.testing.assert_close(tensor, weights[key], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_known", [1, 5, VOCAB_SIZE - 1, VOCAB_SIZE])
def test_divergence_and_its_gradient(num_known: int) -> None:
    """Of tokens that are known, and the others as one; zero for equal models."""
    generator = torch.Generator().manual_seed(0)
    logits, known = (3 * torch.randn(6, VOCAB_SIZE, generator=generator) for _ in range(2))
    known[0, 0] = 40.0  # certain of one token
    values, ids = known.log_softmax(-1).topk(num_known)
    logits.requires_grad_()
    divergences = divergence(logits, values, ids)
    expected, own = coarse(known.double(), ids), coarse(logits.double(), ids)
    if num_known == VOCAB_SIZE:
        expected, own = expected[:, :-1], own[:, :-1]
    wanted = F.kl_div(own.log(), expected.clamp(min=0), reduction="none").sum(-1)
    torch.testing.assert_close(divergences.double(), wanted, atol=1e-5, rtol=1e-5)
    (gradient,) = torch.autograd.grad(divergences.sum(), logits)
    (exact,) = torch.autograd.grad(wanted.sum(), logits)
    torch.testing.assert_close(gradient, exact, atol=1e-5, rtol=1e-5)
    assert divergence(known, values, ids).abs().max() < 1e-5


def test_what_does_not_fit_is_refused(root: Path, tmp_path: Path) -> None:
    def refused(**sections: Any) -> str:
        tree = run_of(root)
        for name, values in sections.items():
            tree[name] = {**tree[name], **values}
        try:
            config = parse_run_config(tree)
        except ConfigError as error:
            return str(error)
        problems = config.objective.kind.problems(config)
        problems += check_reference_scores(config, open_sources(config.data), [])
        return str(ConfigError(problems))

    assert "needs one of objective.teacher, the directory" in refused(objective={"teacher": None})
    assert "data.packing=best_fit" in refused(data={"packing": "concatenate"})
    assert "has scores of no dataset" in refused(objective={"teacher": str(tmp_path)})
    assert "has no effect" in refused(objective={"type": "next_token"})
    text = refused(batch={"sequence_length": LENGTH // 2})
    assert "was divided: sequence_length: 32 there, 16 now" in text
    score(root, "student", tmp_path / "sums")
    assert "without the most probable tokens" in refused(
        objective={"teacher": str(tmp_path / "sums")}
    )
