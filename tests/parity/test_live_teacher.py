"""Distillation from a teacher that is computed in the run, against plain transformers and
PyTorch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import bigtrain
from bigtrain.data.tokenizers.training import train_tokenizer
from bigtrain.errors import BigtrainError
from bigtrain.python_api.planning import predicted_run
from bigtrain.run.preflight import inspect_inputs
from bigtrain.settings.loading import parse_run_config
from bigtrain.settings.resolve import resolve_run
from tests.parity.objective_runs import (
    LAYOUTS,
    VOCAB_SIZE,
    compare,
    save_llama,
    steps_of,
    train,
    train_in_two,
)
from tests.parity.test_distillation import TOP_K, plain_run, run_of
from tests.parity.test_distillation import unscored as root
from tests.support.lives import shared_server

__all__ = ["root"]

pytestmark = [pytest.mark.distributed]

SLOW = pytest.mark.slow


def live_run(root: Path, **sections: Any) -> dict[str, Any]:
    tree = run_of(root, **sections)
    del tree["objective"]["teacher"]
    more = {"teacher_model": str(root / "teacher"), "teacher_top_k": TOP_K}
    return tree | {"objective": tree["objective"] | more}


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        ("zero3", {}),
        *(pytest.param(name, {}, marks=SLOW) for name in ("zero0", "zero2", "tensor")),
        *(pytest.param(name, {}, marks=SLOW) for name in ("zero3 sequence", "ring")),
        *(
            pytest.param(name, {"adapters": {"rank": 4, "alpha": 16.0}}, marks=SLOW)
            for name in ("zero3", "zero1 ring")
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_equals_a_plain_loop(root: Path, name: str, sections: dict[str, Any]) -> None:
    """Half of it on two ranks, the rest, resumed, on one."""
    tree = live_run(root, **LAYOUTS[name].sections, **sections)
    place = f"live-{name}-{'-'.join(sections)}".replace(" ", "-")
    lines = train_in_two(root, place, tree)
    compare(root / place, lines, plain_run(root, "adapters" in sections))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "student", "teacher", "temperature", "loss"),
    [
        ("zero3", "padded_student", "padded_teacher", 2.5, "chunked"),
        ("tensor", "student", "padded_teacher", 0.5, "chunked"),
        ("zero1", "padded_student", "teacher", 1.5, "plain"),
        ("sequence", "student", "teacher", 2.0, "plain"),
    ],
)
def test_temperatures_and_padded_vocabularies(
    root: Path, layout: str, student: str, teacher: str, temperature: float, loss: str
) -> None:
    tree = live_run(root, **LAYOUTS[layout].sections)
    more = {"teacher_model": str(root / teacher), "temperature": temperature}
    tree["objective"] |= more
    tree["model"] |= {"path": str(root / student), "loss": loss}
    if loss == "plain":
        del tree["model"]["loss_chunk_tokens"]
    place = f"padded-{layout}"
    lines = train_in_two(root, place, tree)
    compare(root / place, lines, plain_run(root, False, student, teacher, temperature))


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits(root: Path) -> None:
    tree = live_run(root, **LAYOUTS["zero3"].sections)
    complete = train(root, "complete", tree, 2)
    resumed = train_in_two(root, "resumed", tree, then_size=2)
    losses = ([row["loss"] for row in steps_of(lines)] for lines in (resumed, complete))
    assert next(losses) == next(losses)
    weights = bigtrain.load_state_dict(root / "complete")
    for key, tensor in bigtrain.load_state_dict(root / "resumed").items():
        assert torch.equal(tensor, weights[key]), key


@pytest.mark.slow
def test_dropout_of_the_teacher_is_off(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "teacher", tmp_path / "teacher")
    path = tmp_path / "teacher/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_dropout": 0.5}))
    losses = []
    for teacher in (root / "teacher", tmp_path / "teacher"):
        tree = live_run(root)
        tree["objective"]["teacher_model"] = str(teacher)
        lines = train(root, f"dropout-{len(losses)}", tree, 1)
        losses.append([row["loss"] for row in steps_of(lines)])
    assert losses[0] == losses[1]


def refusal(tree: dict[str, Any]) -> str:
    with pytest.raises(BigtrainError) as caught:
        inspect_inputs(resolve_run(parse_run_config(tree), 2))
    return str(caught.value)


def test_what_does_not_fit_is_refused(root: Path, tmp_path: Path) -> None:
    def with_objective(**changes: Any) -> dict[str, Any]:
        tree = live_run(root)
        return tree | {"objective": tree["objective"] | changes}

    key = "objective.teacher_model"
    assert "needs only one of objective.teacher" in refusal(with_objective(teacher="scores"))
    assert "needs one of objective.teacher" in refusal(with_objective(teacher_model=None))
    stages = live_run(root, parallel={"pipeline": 2})
    assert "pipeline = 2: a teacher in the run is not divided" in refusal(stages)
    assert f"{VOCAB_SIZE} or less" in refusal(with_objective(teacher_top_k=VOCAB_SIZE + 1))
    absent = refusal(with_objective(teacher_model=str(tmp_path / "absent")))
    assert key in absent
    assert "absent" in absent
    other = tmp_path / "other"
    save_llama(other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": VOCAB_SIZE - 1}))
    divided = live_run(root, parallel={"expert": 2})
    divided["model"]["path"] = str(root / "experts")
    assert key in refusal(divided)
    text = refusal(with_objective(teacher_model=str(other)))
    assert f"{key} = " in text
    assert f"has a vocabulary of {VOCAB_SIZE - 1} tokens, and the data's tokenizer 96" in text
    stored = run_of(root)
    stored["objective"]["temperature"] = 2.0
    assert "objective.temperature = 2.0: stored scores are probabilities at" in refusal(stored)


def test_the_teacher_is_predicted(root: Path) -> None:
    """Its 4-byte parameters: whole on every rank, or divided by ZeRO 3."""
    teacher = AutoModelForCausalLM.from_pretrained(root / "teacher")
    parameters = sum(parameter.numel() for parameter in teacher.parameters())
    for engine, parts in (("zero1", 1), ("zero3", 2)):
        run = resolve_run(parse_run_config(live_run(root)), 2, engine)
        prediction, _ = predicted_run(run, None)
        adapters = prediction.memory.teacher - 4 * parameters / parts
        assert 0 < adapters < parameters


def test_a_teacher_with_other_tokens_is_refused(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "teacher", tmp_path / "teacher")
    for directory, text in ((tmp_path / "teacher", "abcde"), (root / "one/tokenizer", "vwxyz")):
        train_tokenizer(iter([[text]]), 260).save(directory)
    tree = live_run(root)
    tree["objective"]["teacher_model"] = str(tmp_path / "teacher")
    tree["model"]["path"] = str(root / "student")
    text = refusal(tree)
    shutil.rmtree(root / "one/tokenizer")
    (root / "one/tokenizer").mkdir()
    assert "objective.teacher_model" in text
    assert "of the teacher's run" in text


@pytest.mark.slow
def test_another_teacher_is_refused_when_the_run_resumes(root: Path, tmp_path: Path) -> None:
    save_llama(tmp_path / "teacher", hidden_size=48, seed=1)
    tree = live_run(root)
    tree["objective"]["teacher_model"] = str(tmp_path / "teacher")
    tree["output"] = {"directory": str(tmp_path / "run"), "export": False}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(tree | {"train": {"steps": 3}}))
    codes, text = shared_server().live(["--config", str(path)], world_size=1)
    assert codes == [0], text
    save_llama(tmp_path / "teacher", hidden_size=48, seed=2)
    more = {"checkpoint": {"allow_changes": ["train.steps"]}}
    path.write_text(yaml.safe_dump(tree | more))
    codes, text = shared_server().live(["--config", str(path)], world_size=1)
    assert codes != [0]
    assert "is another model than the one with which the run began" in text
    assert "Traceback" not in text
    (tmp_path / "teacher/model.safetensors").rename(tmp_path / "teacher/other.safetensors")
    index = {"metadata": {}, "weight_map": {}}
    with safe_open(tmp_path / "teacher/other.safetensors", framework="pt") as opened:
        index["weight_map"] = dict.fromkeys(opened.keys(), "other.safetensors")
    (tmp_path / "teacher/model.safetensors.index.json").write_text(json.dumps(index))
    codes, text = shared_server().live(["--config", str(path)], world_size=1)
    assert codes != [0]
    assert "other.safetensors" in text
