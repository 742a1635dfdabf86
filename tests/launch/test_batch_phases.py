"""Runs with `batch.phases`: the numbers of a plain loop, and of launches resumed by hand."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml

from bigtrain.data.samples.shuffle import SampleOrder
from bigtrain.engine.checkpoint.io import read_full
from bigtrain.settings.lr_schedule import learning_rate_at
from bigtrain.settings.run_config import RunConfig
from tests.launch.conftest import Finished, Inputs, metrics, run_tree, train

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

FIRST = {"sequence_length": 16, "global_batch_size": 4}
THEN = {"sequence_length": 32, "global_batch_size": 8}
TURN, END = 4, 8


@pytest.fixture
def tree(inputs: Inputs, base: Path, tmp_path: Path) -> dict[str, Any]:
    """A run of two phases of four steps."""
    settings = run_tree(inputs.shards, tmp_path / "run")
    settings["model"] = {"path": str(base)}
    settings["data"]["chunk_length"] = 32
    settings["batch"] = {**THEN, "micro_batch_size": 1, "phases": [{"steps": TURN, **FIRST}]}
    settings["train"] = {"steps": END}
    settings["checkpoint"] = {"every_steps": 2, "keep_last": 8}
    settings["engine"]["deepspeed_config"] = "zero1"
    settings["output"]["export"] = False
    return settings


def start(tree: dict[str, Any], *overrides: str, ranks: int = 2) -> Finished:
    run_yaml = Path(tree["output"]["directory"]).with_name("run.yaml")
    run_yaml.write_text(yaml.safe_dump(tree, sort_keys=False))
    return train("--config", run_yaml, *overrides, num_processes=ranks)


def elsewhere(tree: dict[str, Any], name: str) -> tuple[dict[str, Any], Path]:
    """The same run in another directory."""
    other = copy.deepcopy(tree)
    run = Path(tree["output"]["directory"]).with_name(name)
    other["output"]["directory"] = str(run)
    return other, run


def assert_same(run: Path, other: Path) -> None:
    """Losses, gradient norms and everything that the last checkpoints have of tensors."""
    for key in ("loss", "grad_norm", "lr", "tokens", "samples", "held_out_loss"):
        assert metrics(other, key) == metrics(run, key), key
    mine, others = (
        read_full(there / f"checkpoints/step-{END:08}/tensors") for there in (run, other)
    )
    assert mine.keys() == others.keys()
    for name, value in mine.items():
        assert torch.equal(value, others[name]), name


def read_tokens(tree: dict[str, Any]) -> np.ndarray[Any, Any]:
    (file,) = Path(tree["data"]["path"]).glob("train*.bin")
    return np.fromfile(file, np.uint16).astype(np.int64)


def read_starts(tree: dict[str, Any], run: Path) -> list[np.ndarray[Any, Any]]:
    """Where in the tokens the samples of each step begin."""
    chunks = (len(read_tokens(tree)) - 1) // 32
    short = SampleOrder(chunks * 2, tree["seed"], windows_per_chunk=2)
    state = json.loads((run / f"checkpoints/step-{END:08}/state.json").read_text())
    (begin,) = [source["start"] for source in state["phases"][1]["sources"]]
    long = SampleOrder(chunks, tree["seed"])
    return [
        *(short.windows(step * 4, 4) * 16 for step in range(TURN)),
        *(long.windows(begin + step * 8, 8) * 32 for step in range(END - TURN)),
    ]


def plain_losses(tree: dict[str, Any], starts: list[np.ndarray[Any, Any]]) -> list[float]:
    """Losses of transformers and AdamW in this process."""
    from transformers import AutoModelForCausalLM

    config = RunConfig.model_validate(tree)
    model = AutoModelForCausalLM.from_pretrained(tree["model"]["path"], dtype=torch.float32)
    section = config.optimizer
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": section.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=section.betas, eps=section.eps)
    tokens = read_tokens(tree)
    losses = []
    for step, begins in enumerate(starts):
        length = 16 if step < TURN else 32
        rows = torch.from_numpy(tokens[begins[:, None] + np.arange(length + 1)])
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), section.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, section.lr, config.schedule, END)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "engine",
    [
        [],
        pytest.param(["parallel.pipeline=2"], marks=pytest.mark.slow),
    ],
    ids=["zero1", "pipeline"],
)
def test_trains_as_a_plain_loop(tree: dict[str, Any], engine: list[str]) -> None:
    run = Path(tree["output"]["directory"])
    finished = start(tree, *engine)
    assert finished.code == 0, finished.output
    losses = metrics(run)
    assert list(losses) == list(range(1, END + 1))
    starts = read_starts(tree, run)
    read = np.concatenate([
        (begins[:, None] + np.arange(16 if step < TURN else 32)).flatten()
        for step, begins in enumerate(starts)
    ])  # fmt: skip
    assert len(np.unique(read)) == len(read) == metrics(run, "tokens")[END]
    assert list(losses.values()) == pytest.approx(plain_losses(tree, starts), rel=2e-5)


@pytest.mark.slow
def test_equals_launches_by_hand(tree: dict[str, Any]) -> None:
    run = Path(tree["output"]["directory"])
    finished = start(tree)
    assert finished.code == 0, finished.output
    by_hand, other = elsewhere(tree, "by_hand")
    by_hand["batch"] = {**FIRST, "micro_batch_size": 1}
    assert start(by_hand).code == 0
    for step in (6, 8):
        shutil.rmtree(other / f"checkpoints/step-{step:08}")
    by_hand["batch"] = {**THEN, "micro_batch_size": 1}
    finished = start(by_hand, "checkpoint.allow_changes=[batch]")
    assert finished.code == 0, finished.output
    assert_same(run, other)


@pytest.mark.slow
def test_continues_from_every_checkpoint(tree: dict[str, Any]) -> None:
    """As a run that was killed after it, inside each phase and between them; and from one of the
    phase before, if the newest is corrupt."""
    run = Path(tree["output"]["directory"])
    finished = start(tree)
    assert finished.code == 0, finished.output
    for step in (2, 4, 6):
        stopped, there = elsewhere(tree, f"stopped{step}")
        shutil.copytree(run, there)
        for later in range(step + 2, END + 1, 2):
            shutil.rmtree(there / f"checkpoints/step-{later:08}")
        finished = start(stopped)
        assert finished.code == 0, finished.output
        assert f"resumed at step {step} " in finished.output
        assert_same(run, there)
    stopped, there = elsewhere(tree, "corrupt")
    shutil.copytree(run, there)
    shutil.rmtree(there / "checkpoints/step-00000008")
    for step in (4, 6):
        for file in (there / f"checkpoints/step-{step:08}/tensors").rglob("*.safetensors"):
            content = bytearray(file.read_bytes())
            content[-5] ^= 1
            file.write_bytes(content)
    finished = start(stopped)
    assert finished.code == 0, finished.output
    assert "resumed at step 2 " in finished.output
    assert_same(run, there)


@pytest.mark.slow
def test_refuses_other_phases(tree: dict[str, Any]) -> None:
    assert start(tree, "checkpoint.every_steps=6").code == 0
    run = Path(tree["output"]["directory"])
    shutil.rmtree(run / f"checkpoints/step-{END:08}")
    tree["batch"]["phases"] += [{"steps": 3, "global_batch_size": 4}]
    tree["batch"]["phases"][0]["global_batch_size"] = 2
    finished = start(tree, ranks=1)
    assert finished.code == 2
    for text in (
        "batch.phases: steps 1 to 4: 4 samples of 16 tokens there, which the run has trained with, "
        "2 samples of 16 tokens now",
        "batch.phases: steps 7 to 7: 8 samples of 32 tokens there, 4 samples of 32 tokens now",
        "checkpoint.allow_changes=[batch.phases]",
    ):
        assert text in finished.output, finished.output
    tree["batch"]["phases"][0]["global_batch_size"] = 4
    finished = start(tree, "checkpoint.allow_changes=[batch.phases]")
    assert finished.code == 0, finished.output
    assert metrics(run, "samples")[END] == 16 + 2 * 8 + 4 + 8
