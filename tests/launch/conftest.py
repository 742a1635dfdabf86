"""A small real dataset, made by the command line, and ways to start train.py as users do."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from bigtrain.cli import main as bigtrain
from tests.support.lives import shared_server
from tests.support.worlds import ROOT, free_port

TRAIN = ROOT / "bigtrain" / "train.py"
ZERO3 = ROOT / "ds_configs" / "zero3.json"
VOCAB_SIZE = 320
STEPS = 12
SAVE_EVERY = 4

# What a launcher puts there; tests may themselves run below one.
_OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


@dataclass(frozen=True)
class Inputs:
    """Where the text, the tokenizer, the shards and the run YAML lie."""

    texts: Path
    tokenizer: Path
    shards: Path
    run_yaml: Path


@dataclass(frozen=True)
class Finished:
    """A launch that ended: its exit code, and standard output and error as one text."""

    code: int
    output: str


def run_tree(shards: Path, directory: Path) -> dict[str, Any]:
    """A run of a Llama with two layers on `shards`, in fp32, that takes seconds."""
    return {
        "model": {
            "config": {
                "model_type": "llama",
                "vocab_size": VOCAB_SIZE,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 64,
                "tie_word_embeddings": True,
                "bos_token_id": None,
                "eos_token_id": 0,
            }
        },
        "data": {"path": str(shards)},
        "batch": {"sequence_length": 32, "global_batch_size": 8, "micro_batch_size": 2},
        "train": {"steps": STEPS},
        "optimizer": {"lr": 5e-3},
        "schedule": {"warmup_steps": 2},
        "precision": {"dtype": "float32"},
        "checkpoint": {"every_steps": SAVE_EVERY, "keep_last": 2},
        "logging": {"every_steps": 1},
        "evaluation": {"every_steps": 6, "samples": 8},
        "output": {"directory": str(directory)},
        "engine": {"deepspeed_config": "zero0"},
        "seed": 3,
    }


def write_documents(path: Path, count: int, seed: int = 0) -> Path:
    """`count` documents of up to sixty sentences of a small language, as JSON lines."""
    chooser = random.Random(seed)
    people = "Ada Emmy Grace Katherine Sofja Maryam Noether Lovelace".split()
    deeds = "proved computed wrote measured taught compiled asked refused".split()
    things = "a theorem|the orbit|the first program|an invariant|東京|the café".split("|")
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            sentences = (
                f"{chooser.choice(people)} {chooser.choice(deeds)} {chooser.choice(things)}."
                for _ in range(chooser.randint(1, 60))
            )
            file.write(json.dumps({"text": " ".join(sentences)}) + "\n")
    return path


def tokenize(texts: Path, tokenizer: Path, output: Path) -> Path:
    """Shards of `texts`, through the command line."""
    words = ["tokenize", "--input", texts, "--tokenizer", tokenizer, "--output", output]
    assert bigtrain([*map(str, words), "--held-out", "0.1"]) == 0
    return output


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Text, a tokenizer trained on it, its shards, and a run YAML that writes beside them."""
    root = tmp_path_factory.mktemp("inputs")
    texts = write_documents(root / "texts.jsonl", 80)
    tokenizer = root / "tokenizer"
    words = ["tokenizer", "--input", texts, "--vocab-size", VOCAB_SIZE, "--output", tokenizer]
    assert bigtrain(list(map(str, words))) == 0
    shards = tokenize(texts, tokenizer, root / "shards")
    run_yaml = root / "run.yaml"
    run_yaml.write_text(yaml.safe_dump(run_tree(shards, root / "run"), sort_keys=False))
    return Inputs(texts, tokenizer, shards, run_yaml)


def start(command: Sequence[str | Path], home: Path) -> subprocess.Popen[str]:
    """Start `command` in a process group of its own, with both outputs in one pipe.

    `home`: for Hugging Face's caches, so that no settings of this machine's user are found.
    """
    environment = {key: value for key, value in os.environ.items() if key not in _OF_LAUNCHERS}
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        env={**environment, "HF_HOME": str(home), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=home,
        start_new_session=True,
    )


def wait(process: subprocess.Popen[str], timeout_seconds: int = 270) -> Finished:
    """Wait until every process that holds the pipe is gone; kills them all if that takes long."""
    try:
        output, _ = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        # torchrun gives its workers sessions of their own, and ends them when asked politely.
        process.terminate()
        try:
            output, _ = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        pytest.fail(f"not finished after {timeout_seconds} s:\n{output[-6000:]}")
    return Finished(process.returncode, output)


def launch(command: Sequence[str | Path], home: Path) -> Finished:
    """`start` and `wait`."""
    return wait(start(command, home))


def train(*arguments: str | Path, num_processes: int = 1) -> Finished:
    """train.py's program in forked processes, which spares the seconds that it takes to import.

    For what is the same under every launcher; `launch` starts it as users do.
    """
    codes, output = shared_server().live(list(map(str, arguments)), world_size=num_processes)
    return Finished(max(codes, key=abs), output)


def trained(*arguments: str | Path, num_processes: int = 1) -> str:
    """`train` to a good end; returns the output."""
    finished = train(*arguments, num_processes=num_processes)
    assert finished.code == 0, finished.output
    return finished.output


def launcher(name: str) -> list[str | Path]:
    """Arguments to Python that start train.py with two processes (`python`: with one)."""
    port = str(free_port())
    if name == "python":
        return [TRAIN]
    if name == "torchrun":
        module = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", port]
        return [*module, TRAIN]
    if name == "deepspeed":
        module = ["-m", "deepspeed.launcher.runner", "--num_accelerators", "2"]
        return [*module, "--master_port", port, TRAIN]
    assert name == "accelerate", name
    # Its --cpu would start one process and tell it nothing but the main process's address.
    module = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    rest = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    return [*module, *rest, "--main_process_port", port, TRAIN]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `bigtrain.train.main` in this process see no launcher."""
    for name in _OF_LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty HF_HOME."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def finished_run(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that one process ran to its end.

    Tests that write must copy it.
    """
    directory = tmp_path_factory.mktemp("alone") / "run"
    finished = train("--config", inputs.run_yaml, f"output.directory={directory}")
    assert finished.code == 0, finished.output
    return directory


def metrics(run: Path, key: str = "loss") -> dict[int, float]:
    """Values of `key` by step; a step that stands twice in metrics.jsonl is an error."""
    values_by_step: dict[int, float] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        figures = json.loads(line)
        if key in figures:
            assert figures["step"] not in values_by_step
            values_by_step[figures["step"]] = figures[key]
    return values_by_step


def snapshot(directory: Path) -> dict[str, bytes]:
    """Every file below `directory` with its contents; folders end in a slash."""
    return {
        f"{path.relative_to(directory)}{'/' if path.is_dir() else ''}": (
            b"" if path.is_dir() else path.read_bytes()
        )
        for path in sorted(directory.rglob("*"))
    }


@pytest.fixture(scope="module")
def base(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the finished run's export, for adapters to be trained beside."""
    directory = tmp_path_factory.mktemp("base") / "hf"
    shutil.copytree(finished_run / "hf", directory)
    return directory
