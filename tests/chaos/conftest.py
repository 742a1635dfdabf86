"""A run whose lives take a second or two, started again and again by one server."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from bigtrain.engine.checkpoint.io import read_full
from bigtrain.run.checkpointing import checkpoints
from tests.support.datasets import write_dataset
from tests.support.lives import Server, shared_server

STEPS = 24


@pytest.fixture(scope="session")
def server() -> Server:
    return shared_server()


@pytest.fixture(scope="session")
def run_yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `STEPS` steps with dropout that saves after every second one."""
    root = tmp_path_factory.mktemp("chaos")
    shards = write_dataset(root / "shards", vocab_size=64)
    tree = {
        "model": {
            "config": {
                "model_type": "llama",
                "vocab_size": 64,
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "max_position_embeddings": 32,
                "attention_dropout": 0.1,
                "bos_token_id": None,
                "eos_token_id": None,
            }
        },
        "data": {"path": str(shards)},
        "batch": {"sequence_length": 16, "global_batch_size": 4, "micro_batch_size": 1},
        "train": {"steps": STEPS},
        "optimizer": {"lr": 3e-3},
        "schedule": {"warmup_steps": 4},
        "precision": {"dtype": "float32"},
        "checkpoint": {"every_steps": 2, "keep_last": 2, "keep_every_steps": 8},
        "logging": {"every_steps": 1},
        "output": {"directory": "unused", "export": False},
        "engine": {"deepspeed_config": "zero2"},
    }
    path = root / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture(scope="session")
def experts_yaml(run_yaml: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run with a mixture of experts, which two ranks divide."""
    tree = yaml.safe_load(run_yaml.read_text())
    tree["model"]["config"] |= {
        "model_type": "qwen3_moe", "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    }  # fmt: skip
    path = tmp_path_factory.mktemp("experts") / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory of this machine's shared memory, empty again at the end of the test."""
    if not Path("/dev/shm").is_dir():
        pytest.skip("this machine has no /dev/shm")
    with tempfile.TemporaryDirectory(prefix="bigtrain-test-", dir="/dev/shm") as name:
        yield Path(name)


def arguments(run_yaml: Path, directory: Path, *more: str) -> list[str]:
    return ["--config", str(run_yaml), f"output.directory={directory}", *more]


def complete(server: Server, words: list[str], **more: Any) -> str:
    """Let a run on two ranks, or `world_size`, come to its end; return what it printed."""
    codes, text = server.live(words, **more)
    assert codes == [0] * more.get("world_size", 2), text
    return text


def refused(server: Server, words: list[str], **more: Any) -> str:
    """Return the text with which a run ends with an error that it names."""
    codes, text = server.live(words, **more)
    assert 2 in codes, text
    assert "Traceback" not in text
    return text


def run_until_killed(server: Server, words: list[str], **more: Any) -> str:
    """Return what a run printed in which a rank was killed."""
    codes, text = server.live(words, **more)
    assert -signal.SIGKILL in codes, text
    return text


def final_tensors(run: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    """Masters, optimizer states and buffers of a checkpoint that is whole to the last byte."""
    return read_full(checkpoints.find(run, step) / checkpoints.TENSORS)


def losses(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line and "event" not in line}


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    """What metrics.jsonl says of one kind of event."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("event") == kind]


def assert_same_run(run: Path, reference: Path) -> None:
    """Bit for bit: weights and optimizer at the end, the loss of every step."""
    ours, theirs = final_tensors(run), final_tensors(reference)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    assert losses(run) == losses(reference)


@pytest.fixture(scope="session")
def uninterrupted(server: Server, run_yaml: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run on two processes that nobody disturbed."""
    run = tmp_path_factory.mktemp("uninterrupted") / "run"
    complete(server, arguments(run_yaml, run))
    assert checkpoints.list_steps(run) == [8, 16, 22, 24]
    return run
