"""Cost of a checkpoint, compared with DeepSpeed's own and the disk.

disk       as many bytes written to one file, fsynced, in blocks of 8 MiB: the lower bound
async      `checkpoint.asynchronous`: seconds the loop is blocked, seconds until the checkpoint
           exists, and how much slower steps are meanwhile
sync       the same without a thread: the loop is blocked until the checkpoint exists
deepspeed  `engine.save_checkpoint`, and with all its files fsynced after, which it does not do

bigtrain's include fsync, checksums, and the probe's forward pass. Loads read what the page cache
holds. One process trains a Llama; all take turns, and the medians over the rounds are printed as
JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from benchmarks.support.contenders import Bigtrain
from benchmarks.support.points import SIZES, Point, resolve_point
from bigtrain.data.loading.loader import open_training_data
from bigtrain.engine.checkpoint.snapshot import restore_engine
from bigtrain.run.checkpointing import checkpoints
from bigtrain.run.checkpointing.saver import Saver
from bigtrain.run.preflight import inspect_inputs
from bigtrain.run.session import open_session
from bigtrain.system.files import sync_to_disk
from bigtrain.system.world import World

BLOCK_BYTES = 8 << 20


def timed(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def write_to_disk(path: Path, num_bytes: int) -> None:
    """Write one file of that size, on the disk when this returns."""
    block = os.urandom(BLOCK_BYTES)
    with path.open("wb") as file:
        for begin in range(0, num_bytes, BLOCK_BYTES):
            file.write(block[: min(BLOCK_BYTES, num_bytes - begin)])
        file.flush()
        os.fsync(file.fileno())
    path.unlink()


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def sync_all(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            sync_to_disk(path)


class Figures:
    """Seconds by name, a value for each round."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def add(self, name: str, seconds: float) -> None:
        self.seconds.setdefault(name, []).append(seconds)

    def medians(self) -> dict[str, float]:
        return {name: round(statistics.median(s), 4) for name, s in self.seconds.items()}


def train_until_written(loop: Bigtrain, saver: Saver, figures: Figures, begun: float) -> None:
    """Steps while a save is under way, and how long each takes."""
    thread = saver._pending.thread if saver._pending else None
    while thread is not None and thread.is_alive():
        figures.add("step during async", timed(lambda: loop.run(1)))
    saver.wait(must_succeed=True)
    figures.add("async total", time.perf_counter() - begun)


def a_round(
    loop: Bigtrain, savers: dict[str, Saver], directory: Path, figures: Figures
) -> dict[str, int]:
    """Everyone once; returns the bytes that each wrote."""
    run_directory = loop.context.directory
    engine = loop.engine
    for _ in range(3):
        figures.add("step", timed(lambda: loop.run(1)))
    begun = time.perf_counter()
    savers["async"].save(loop.state, {})
    figures.add("async stall", time.perf_counter() - begun)
    train_until_written(loop, savers["async"], figures, begun)
    loop.run(1)
    figures.add("sync total", timed(lambda: savers["sync"].save(loop.state, {})))
    newest = checkpoints.find(run_directory, None, "small")
    scalars = checkpoints.read_state(newest)["engine"]
    figures.add("load", timed(lambda: restore_engine(engine, newest / "tensors", scalars)))
    ours = size_of(newest)
    figures.add("disk", timed(lambda: write_to_disk(directory / "block", ours)))
    native = directory / "deepspeed"
    begun = time.perf_counter()
    engine.engine.save_checkpoint(str(native), tag="one")
    figures.add("deepspeed save", time.perf_counter() - begun)
    sync_all(native)
    figures.add("deepspeed save and fsync", time.perf_counter() - begun)
    figures.add("deepspeed load", timed(lambda: engine.engine.load_checkpoint(str(native), "one")))
    return {"bigtrain": ours, "deepspeed": size_of(native)}


def measure(size: str, zero_stage: int, rounds: int, directory: Path) -> dict[str, Any]:
    """Measure all contenders in this process. The first round, which allocates, is skipped."""
    most_steps = 1000 * (rounds + 1)
    point = Point(size, zero_stage, 1, 1, "fp32", 0, most_steps, 1, ("bigtrain",))
    run = resolve_point(point, directory)
    with open_session(run, World(0, 1, 0)) as context:
        batches = open_training_data(run.config, run.plan, 0)
        loop = Bigtrain(context, inspect_inputs(run), batches)
        section = run.config.checkpoint.model_copy(update={"asynchronous": False})
        config = run.config.model_copy(update={"checkpoint": section})
        synchronous = replace(loop.context, run=replace(run, config=config))
        savers = {"async": loop.saver, "sync": Saver(synchronous)}
        first, figures = Figures(), Figures()
        num_bytes = a_round(loop, savers, directory, first)
        for _ in range(rounds):
            a_round(loop, savers, directory, figures)
        batches.close()
        num_parameters = sum(p.numel() for p in loop.engine.module.parameters())
    medians = figures.medians()
    return {
        "num_parameters": num_parameters,
        "bytes_per_parameter": {k: round(v / num_parameters, 3) for k, v in num_bytes.items()},
        "seconds": medians,
        "seconds of the first stall, which allocates": round(first.seconds["async stall"][0], 4),
        "ratio to the disk": {
            name: round(medians[name] / medians["disk"], 2)
            for name in ("async stall", "async total", "sync total", "deepspeed save and fsync")
        },
        "megabytes_per_second of the disk": round(num_bytes["bigtrain"] / medians["disk"] / 1e6),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--size", choices=sorted(SIZES), default="50m")
    parser.add_argument("--zero", type=int, choices=range(4), default=1, help="ZeRO stage")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--directory", type=Path, help="on the disk to measure (default: /tmp)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        print(json.dumps(measure(args.size, args.zero, args.rounds, Path(directory)), indent=2))


if __name__ == "__main__":
    main()
