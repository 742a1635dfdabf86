"""Whole runs of train.py for parts: each in a process of its own, on random tokens."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from benchmarks.gpu_check.processes import Life, live
from benchmarks.gpu_check.results import Setup
from benchmarks.gpu_check.stand_ins import out_of_memory_on_cpu
from benchmarks.gpu_check.training import size_of
from benchmarks.support.points import write_random_dataset
from bigtrain.engine.train_engine import TrainEngine
from bigtrain.run.checkpointing.checkpoints import checkpoint_path
from bigtrain.train import main

_PATIENCE_SECONDS = 60.0
_ballast: list[torch.Tensor] = []


def write_run(setup: Setup, name: str, **more: Any) -> list[str]:
    """Arguments of train.py for a run called `name`, its dataset written; `more`: overrides."""
    size, shards = size_of(setup), setup.directory / "shards"
    tokens = 40 * size.samples * size.tokens
    if not shards.exists():
        write_random_dataset(shards, vocab_size=size.vocabulary, num_tokens=tokens)
        words = {f"t{number}": number for number in range(size.vocabulary)}
        tokenizer = Tokenizer(WordLevel(words, unk_token="t0"))
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(shards / "tokenizer")
    tree = {
        "model": {
            "config": {
                "model_type": "llama",
                "vocab_size": size.vocabulary,
                "hidden_size": size.hidden,
                "intermediate_size": 2 * size.hidden,
                "num_hidden_layers": size.layers,
                "num_attention_heads": size.heads,
                "num_key_value_heads": size.heads // 2,
                "max_position_embeddings": size.tokens,
                "bos_token_id": None,
                "eos_token_id": None,
            }
        },
        "data": {"path": str(shards)},
        "batch": {
            "sequence_length": size.tokens,
            "global_batch_size": size.samples,
            "micro_batch_size": size.micro_batch_size,
        },
        "train": {"steps": 8},
        "optimizer": {"lr": 1e-3},
        "logging": {"every_steps": 1},
        "output": {"directory": str(setup.directory / name), "export": False},
    }
    file = setup.directory / f"{name}.yaml"
    file.write_text(json.dumps(tree))  # JSON is YAML
    return ["--config", str(file), *(f"{key}={json.dumps(value)}" for key, value in more.items())]


def train(
    setup: Setup,
    name: str,
    arguments: list[str],
    *,
    limit_seconds: float,
    die_after: int | None = None,
    memory_bytes: int | None = None,
) -> Life:
    """Run train.py's `main` in a process of its own.

    die_after: the process kills itself in the step after the checkpoint of this one is complete.
    memory_bytes: how much of the device is left to it.
    """

    number = len(list(setup.directory.glob(f"{name}-life*.txt")))
    told: dict[str, Any] = {
        "words": arguments,
        "on_gpu": setup.on_gpu,
        "memory_bytes": memory_bytes,
        "die_after": die_after,
        "directory": str(setup.directory / name),
    }
    log = setup.directory / f"{name}-life{number}.txt"
    return live("lives:run_program", told, setup, log, limit_seconds)


def run_program(
    words: list[str],
    on_gpu: bool,
    memory_bytes: int | None,
    die_after: int | None,
    directory: str,
) -> int:
    """Return `train.py`'s exit code for the arguments `words`; the others as for `train`."""
    _repeatable()
    if memory_bytes is not None:
        if not on_gpu:
            with out_of_memory_on_cpu():
                return main(words)
        free, _ = torch.cuda.mem_get_info()
        _ballast.append(torch.empty(free - memory_bytes, dtype=torch.uint8, device="cuda"))
    if die_after is None:
        return main(words)
    place = checkpoint_path(Path(directory), die_after)
    with mock.patch.object(TrainEngine, "train_step", _dying(place, die_after)):
        return main(words)


def _repeatable() -> None:
    """Make results repeatable: CUDA's fast backward passes sum in the order they finish."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when cuBLAS starts
    torch.use_deterministic_algorithms(True, warn_only=True)


def _dying(directory: Path, after: int) -> Any:
    """Return a `TrainEngine.train_step` that kills its process once `directory` is there."""
    whole, calls = TrainEngine.train_step, [0]

    def step(engine: TrainEngine, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] > after + 1:
            end = time.monotonic() + _PATIENCE_SECONDS
            while not directory.exists() and time.monotonic() < end:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(engine, *args, **kwargs)

    return step


def metrics_of(directory: Path) -> dict[int, dict[str, Any]]:
    """Return lines of metrics.jsonl that a step wrote, by step."""
    lines = (json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line for line in lines if "loss" in line and "grad_norm" in line}
