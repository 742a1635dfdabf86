"""Distillation from stored probabilities of a teacher, against plain transformers and PyTorch."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from transformers import AutoModelForCausalLM

from bigtrain.data.loading.stored_scores import check_reference_scores
from bigtrain.data.shards.dataset import open_sources
from bigtrain.errors import ConfigError
from bigtrain.models.layers.token_loss import divergence
from bigtrain.settings.loading import parse_run_config
from tests.parity.objective_runs import (
    ADAPTERS,
    IGNORED,
    LAYOUTS,
    VOCAB_SIZE,
    Plain,
    compare,
    documents_in,
    plain_training,
    run_tree,
    save_experts,
    save_llama,
    train,
    train_in_two,
)
from tests.support.datasets import write_dataset
from tests.support.lives import shared_server

pytestmark = [pytest.mark.distributed]

SLOW = pytest.mark.slow
LENGTH, STEPS, TOP_K, ALPHA = 32, 6, 5, 0.7


@pytest.fixture(scope="module")
def unscored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two datasets, a student, and a larger teacher."""
    directory = tmp_path_factory.mktemp("distillation")
    for name, seed in (("one", 0), ("two", 1)):
        write_dataset(directory / name, vocab_size=VOCAB_SIZE, seed=seed, masked=name == "two")
    save_llama(directory / "student")
    save_experts(directory / "student", directory / "experts")
    save_llama(directory / "teacher", hidden_size=48, seed=1)
    save_padded(directory / "teacher", directory / "padded_teacher", 24)
    save_padded(directory / "student", directory / "padded_student", 8)
    return directory


def save_padded(model: Path, output: Path, num_rows: int) -> None:
    """Save a model with further rows in its vocabulary, which are as probable as the tokens."""
    padded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    padded.resize_token_embeddings(VOCAB_SIZE + num_rows, mean_resizing=False)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(num_rows)
        for weight in (padded.get_input_embeddings().weight, padded.get_output_embeddings().weight):
            weight[VOCAB_SIZE:].normal_(0.0, float(weight[:VOCAB_SIZE].std()))
    padded.save_pretrained(output)


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
    return run_tree(
        root,
        length=LENGTH,
        steps=STEPS,
        **{
            "model": {"path": str(root / "student"), "loss": "chunked", "loss_chunk_tokens": 7},
            "objective": {
                "type": "distillation",
                "teacher": str(root / "scores"),
                "alpha": ALPHA,
            },
            "data": {"sources": sources, "packing": "best_fit"},
            **sections,
        },
    )


def coarse(logits: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """Probabilities of the tokens `top` [n, k], and of all others together: [n, k + 1]."""
    known = logits.softmax(-1).gather(-1, top)
    return torch.cat([known, 1 - known.sum(-1, keepdim=True)], -1)


def plain_loss(
    teacher: Any, student: Any, parts: list[Any], temperature: float = 1.0
) -> tuple[torch.Tensor, Any]:
    """Mean over the targets, each document by a forward pass of its own. The teacher's rows after
    the tokenizer's tokens do not count."""
    losses = []
    for ids, labels in (document for part in parts for document in documents_in(part)):
        wanted = labels != IGNORED
        if not wanted.any():
            continue
        logits = student(input_ids=ids[None], use_cache=False).logits[0][wanted]
        with torch.no_grad():
            known = teacher(input_ids=ids[None], use_cache=False).logits[0][wanted].double()
        known = known[:, :VOCAB_SIZE] / temperature
        top = known.topk(TOP_K).indices
        probabilities = coarse(logits.double() / temperature, top)
        expected = coarse(known, top)
        divergences = F.kl_div(probabilities.log(), expected, reduction="none").sum(-1)
        divergences = divergences * temperature**2
        entropies = F.cross_entropy(logits, labels[wanted], reduction="none")
        losses.append(ALPHA * divergences + (1 - ALPHA) * entropies)
    return torch.cat(losses).mean(), {}


@cache
def plain_run(
    root: Path,
    adapted: bool,
    name: str = "student",
    teacher_name: str = "teacher",
    temperature: float = 1.0,
) -> Plain:
    tree = run_of(root, **({"adapters": ADAPTERS} if adapted else {}))
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(root / each, dtype=torch.float32)
        for each in (name, teacher_name)
    )
    tree["objective"] = {"type": "next_token"}
    loss_of = partial(plain_loss, teacher.eval(), temperature=temperature)
    return plain_training(tree, student, loss_of)


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        ("zero1", {}),
        *(pytest.param(name, {}, marks=SLOW) for name in ("zero3", "tensor", "sequence")),
        *(pytest.param(name, {}, marks=SLOW) for name in ("stages", "experts")),
        pytest.param("zero3", {"adapters": ADAPTERS}, marks=SLOW),
        pytest.param("zero1", {"loss": "plain"}, marks=SLOW),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_equals_a_plain_loop(root: Path, name: str, sections: dict[str, Any]) -> None:
    """Half of it on two ranks, the rest on one."""
    student = "experts" if name == "experts" else "student"
    more = {key: value for key, value in sections.items() if key != "loss"}
    tree = run_of(root, **LAYOUTS[name].sections, **more)
    tree["model"] |= {"path": str(root / student), "loss": sections.get("loss", "chunked")}
    place = f"{name}-{'-'.join(sections)}"
    lines = train_in_two(root, place, tree)
    compare(root / place, lines, plain_run(root, "adapters" in sections, student))


@pytest.mark.parametrize("student", ["padded_student", pytest.param("student", marks=SLOW)])
def test_rows_after_the_tokens_of_a_stored_teacher_do_not_count(root: Path, student: str) -> None:
    scores = root / "padded_scores"
    if not scores.exists():
        top = ("--kind", "top-k", "--top-k", str(TOP_K))
        score(root, "padded_teacher", scores, *top)
    tree = run_of(root)
    tree["objective"]["teacher"] = str(scores)
    tree["model"]["path"] = str(root / student)
    lines = train(root, f"rows-{student}", tree, 1)
    wanted = plain_run(root, False, student, "padded_teacher")
    compare(root / f"rows-{student}", lines, wanted)


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
