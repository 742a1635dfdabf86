"""Step time and peak memory of preference training, against the next token of as many tokens.

    python benchmarks/preference.py [--size 50m] [--zero 1] [--losses sigmoid ipo] [--rounds 5]

Both train all weights of the same model on rows of the same length, without padding, in one
process: pairs with stored log-probabilities of the reference, or twice as many samples. They take
turns of a step, and the ratio is the median over the rounds; peaks are those of
`support/memory_worker.py`, of all tensors that live at once in a step.
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
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from benchmarks.support.memory_worker import MARK, batches_of, peak_of
from benchmarks.support.points import SIZES, llama
from bigtrain.engine.build import build_engine
from bigtrain.engine.startup.mesh import open_mesh
from bigtrain.engine.startup.process_group import process_group
from bigtrain.engine.train_engine import TrainEngine
from bigtrain.models.configuration import load_hf_config
from bigtrain.settings.resolve import resolve_run
from bigtrain.settings.run_config import RunConfig
from bigtrain.system.world import World

NEXT_TOKEN = "next_token"
NUM_PAIRS = 2
WARM_UP = 2


def run_of(size: str, objective: str, loss: str) -> dict[str, Any]:
    """Return a run of `objective` with `2 * NUM_PAIRS` rows in a step."""
    shape = SIZES[size]
    pairs = objective != NEXT_TOKEN
    num_samples = NUM_PAIRS if pairs else 2 * NUM_PAIRS
    return {
        "model": {"config": llama(shape, shape["sequence_length"]), "loss": loss},
        **({"objective": {"type": "preference", "loss": objective}} if pairs else {}),
        "data": {"path": "unused"},
        "batch": {
            "sequence_length": shape["sequence_length"],
            "global_batch_size": num_samples,
            "micro_batch_size": num_samples,
        },
        "train": {"steps": 1},
        "optimizer": {"lr": 1e-5},
        "precision": {"dtype": "float32"},
        "output": {"directory": "unused"},
    }


def engine_of(tree: dict[str, Any], zero: int, device: torch.device) -> tuple[TrainEngine, Any]:
    """Build the engine of a run of one process; return it with its micro-batches of a step."""
    config = RunConfig.model_validate(tree)
    run = resolve_run(config, 1, f"zero{zero}", "cpu")
    hf_config = load_hf_config(config.model)
    mesh = open_mesh(run.topology, 0)
    engine = build_engine(config, run.engine, run.plan, hf_config, device, mesh)
    return engine, batches_of(config, run.plan)


def peak_bytes(tree: dict[str, Any], zero: int, device: torch.device) -> int:
    """Return the most bytes of live tensors in a step."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as seen:
        engine, batches = engine_of(tree, zero, device)
        for _ in range(WARM_UP):
            engine.train_step(batches, 1e-5)
        with torch.profiler.record_function(MARK):
            engine.train_step(batches, 1e-5)
    engine.close()
    return int(peak_of(seen)["peak"])


def step_seconds(
    trees: dict[str, dict[str, Any]], zero: int, device: torch.device, rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of each round's step, by objective."""
    engines = {name: engine_of(tree, zero, device) for name, tree in trees.items()}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(rounds + WARM_UP):
        for name in list(engines)[:: 1 if number % 2 == 0 else -1]:
            engine, batches = engines[name]
            begun = time.perf_counter()
            engine.train_step(batches, 1e-5)
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - begun)
    for engine, _ in engines.values():
        engine.close()
    return seconds


def measure(args: argparse.Namespace, what: str, loss: str) -> dict[str, Any]:
    """Measure one point in this process; `what`: an objective's peak, or all times."""
    torch.set_num_threads(args.threads)
    with process_group(World(0, 1, 0)) as joined:
        if what != "times":
            return {"peak": peak_bytes(run_of(args.size, what, loss), args.zero, joined.device)}
        names = [NEXT_TOKEN, *args.losses]
        trees = {name: run_of(args.size, name, loss) for name in names}
        return step_seconds(trees, args.zero, joined.device, args.rounds)


def main() -> None:
    """Measure each point in a process of its own, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=sorted(SIZES), default="50m", help="of the model")
    parser.add_argument("--zero", type=int, choices=range(4), default=1, help="ZeRO stage")
    parser.add_argument("--losses", nargs="+", default=["sigmoid"], help="preference losses")
    parser.add_argument("--rounds", type=int, default=5, help="counted steps of each")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--point", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.point is not None:
        what, loss, output = args.point
        Path(output).write_text(json.dumps(measure(args, what, loss)))
        return
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    print(f"{args.size} model, ZeRO {args.zero}, float32, {2 * NUM_PAIRS} rows of "
          f"{SIZES[args.size]['sequence_length']} tokens, {args.threads} threads")  # fmt: skip
    print("loss of the model  objective   s per step  ratio   peak MiB  ratio")
    for loss in ("plain", "chunked"):
        times = in_a_process("times", loss)
        peaks = {name: in_a_process(name, loss)["peak"] for name in times}
        base, base_peak = times[NEXT_TOKEN], peaks[NEXT_TOKEN]
        for name, seconds in times.items():
            ratio = statistics.median(a / b for a, b in zip(seconds, base, strict=True))
            peak = peaks[name]
            print(
                f"{loss:<17}  {name:<10}  {statistics.median(seconds):10.3f}  {ratio:5.3f}  "
                f"{peak / 2**20:9.1f}  {peak / base_peak:5.3f}",
                flush=True,
            )


def in_a_process(what: str, loss: str) -> dict[str, Any]:
    """Return what `measure` does in a new process: DeepSpeed keeps state in its modules."""
    with tempfile.TemporaryDirectory(prefix="preference_") as directory:
        output = Path(directory) / "result.json"
        command = [sys.executable, __file__, *sys.argv[1:], "--point", what, loss, str(output)]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        if finished.returncode:
            sys.exit(f"{finished.stdout}{finished.stderr}")
        result: dict[str, Any] = json.loads(output.read_text())
    return result


if __name__ == "__main__":
    main()
