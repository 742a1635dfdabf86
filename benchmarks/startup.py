"""Time from command to first step, against the imports that a run cannot avoid; and of --help.

run      `python bigtrain/train.py` of one step on a tiny model, until its first step is logged
imports  a Python that imports torch, deepspeed and transformers' model and nothing else
help     `bigtrain --help`; python: a Python that does nothing
With --compile also a run with model.compile=on: `compiled` with an empty cache of torch's compiler,
`cached` with what that run has left there.

They take turns, a complete process each; the medians and their ratios are printed, and as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.support.points import SIZES, write_random_dataset

ROOT = Path(__file__).resolve().parents[1]

# The imports of train.py to train a Llama, in their order.
IMPORTS = (
    "import torch, torch.distributed.checkpoint, deepspeed; "
    "from transformers import AutoModelForCausalLM; "
    "from transformers.models.llama.modeling_llama import LlamaForCausalLM"
)


def write_run(directory: Path) -> Path:
    """Return a run of two steps of the tiny model; logs each."""
    shape = dict(SIZES["tiny"])
    length = shape.pop("sequence_length")
    write_random_dataset(
        directory / "shards", vocab_size=shape["vocab_size"], num_tokens=64 * length
    )
    path = directory / "run.yaml"
    run = {
        "model": {"config": {"model_type": "llama", **shape, "max_position_embeddings": length}},
        "data": {"path": str(directory / "shards")},
        "batch": {"sequence_length": length, "global_batch_size": 4},
        "train": {"steps": 1000},
        "optimizer": {"lr": 1e-4},
        "precision": {"dtype": "float32"},
        "logging": {"every_steps": 1},
        "engine": {"deepspeed_config": "zero1"},
    }
    path.write_text(json.dumps(run))  # JSON is YAML
    return path


def seconds_to_first_step(
    run: Path, directory: Path, environment: dict[str, str], *settings: str
) -> float:
    """Until metrics.jsonl has a line; the run, with these `settings`, is then ended."""
    command = [sys.executable, str(ROOT / "bigtrain" / "train.py"), "--config", str(run)]
    metrics = directory / "metrics.jsonl"
    with (directory.parent / "output.txt").open("w") as output:
        begun = time.perf_counter()
        process = subprocess.Popen(
            [*command, f"output.directory={directory}", *settings],
            stdout=output,
            stderr=output,
            env=environment,
        )
        try:
            while not (metrics.exists() and metrics.stat().st_size):
                if process.poll() is not None:
                    sys.exit((directory.parent / "output.txt").read_text())
                time.sleep(0.005)
            return time.perf_counter() - begun
        finally:
            process.kill()
            process.wait()


def seconds_of(command: list[str], environment: dict[str, str]) -> float:
    """Wall time of a process that must succeed."""
    begun = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return time.perf_counter() - begun


def main() -> None:
    """Measure, print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds; one before warms up")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="also with compiled layers")
    args = parser.parse_args()
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(args.threads),
        "PYTHONPATH": str(ROOT),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    seconds: dict[str, list[float]] = {"run": [], "imports": [], "help": [], "python": []}
    with tempfile.TemporaryDirectory(prefix="startup_") as name:
        run = write_run(Path(name))
        for turn in range(args.rounds + 1):
            place = Path(name) / f"round{turn}" / "run"
            place.parent.mkdir()
            measured = {
                "run": seconds_to_first_step(run, place, environment),
                "imports": seconds_of([sys.executable, "-c", IMPORTS], environment),
                "help": seconds_of([sys.executable, "-m", "bigtrain.cli", "--help"], environment),
                "python": seconds_of([sys.executable, "-c", ""], environment),
            }
            if args.compile:
                cache = {"TORCHINDUCTOR_CACHE_DIR": str(place.parent / "cache")}
                for key in ("compiled", "cached"):
                    measured[key] = seconds_to_first_step(
                        run, place.with_name(key), environment | cache, "model.compile=on"
                    )
            if turn:
                for key, value in measured.items():
                    seconds.setdefault(key, []).append(value)
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    ratios = statistics.median(
        a / b for a, b in zip(seconds["run"], seconds["imports"], strict=True)
    )
    print(f"command to first step {medians['run']:.2f} s = {ratios:.2f} x the imports' ", end="")
    print(f"{medians['imports']:.2f} s")
    if args.compile:
        print(f"with compiled layers {medians['compiled']:.2f} s, ", end="")
        print(f"with a warm cache {medians['cached']:.2f} s")
    print(f"bigtrain --help {medians['help']:.3f} s, bare python {medians['python']:.3f} s")
    print(json.dumps({"seconds": medians, "run_over_imports": ratios}, indent=2))


if __name__ == "__main__":
    main()
