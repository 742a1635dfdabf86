"""Overhead of a trainer above the arithmetic: seconds per optimizer step of three contenders.

bare      a plain PyTorch loop: forward, summed cross-entropy, backward, clip_grad_norm_,
          torch.optim.AdamW(fused=True); batches are in memory. bfloat16: torch.autocast
bigtrain  what train.py runs: `bigtrain.run.loop.Loop` with its loader, engine and metrics writer
hf        transformers.Trainer with ds_configs/zeroN.json unchanged

All three train the same model from the same weights on the same batches, in one process with one
process group, and take turns of a few steps, so that whatever else the machine does falls on all
of them alike. Every turn is compared with the bare loop's turn of the same round; the ratio
reported is the median over the rounds. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from benchmarks.support.contenders import (
    BareLoop,
    Bigtrain,
    Stopwatch,
    describe_machine,
    run_hf_trainer,
)
from benchmarks.support.points import DTYPES, LOG_EVERY_STEPS, SIZES, Point, resolve_point
from bigtrain.data.loading.loader import open_training_data
from bigtrain.data.shards.format import IGNORED_LABEL
from bigtrain.run.preflight import inspect_inputs
from bigtrain.run.session import open_session
from bigtrain.system.world import World

CONTENDERS = ("bare", "bigtrain", "hf")


def measure(point: Point, directory: Path) -> dict[str, Any]:
    """Run one point in this process. Returns seconds, ratios and losses."""
    torch.set_num_threads(point.threads)
    run = resolve_point(point, directory)
    inputs = inspect_inputs(run)
    with open_session(run, World(0, 1, 0)) as context, ExitStack() as stack:
        pin = context.device.type == "cuda"
        batches = open_training_data(run.config, run.plan, 0, device_pin=pin)
        count = point.total_steps + 1
        steps = [batches.step(i * run.plan.global_batch_size) for i in range(count)]
        assert not any((b.labels == IGNORED_LABEL).any() for step in steps for b in step)
        watch = Stopwatch(context.device, point.threads)
        bare = BareLoop(run, inputs.hf_config, steps, context.device)
        loops: dict[str, Callable[[int], None]] = {"bare": bare.run}
        if "bigtrain" in point.contenders:
            own = Bigtrain(context, inputs, batches)
            loops["bigtrain"] = own.run
            stack.callback(own.close)

        def others() -> None:
            # Every other round backwards, so that nobody always follows the same one.
            turn = len(watch.seconds.get("bare", []))
            for name in list(loops)[:: 1 if turn % 2 == 0 else -1]:
                watch.start()
                loops[name](point.steps_per_round)
                watch.stop(name)

        if "hf" in point.contenders:
            run_hf_trainer(point, run, inputs.hf_config, steps, directory, others, watch)
        else:
            for _ in range(point.rounds + 1):
                others()
        batches.close()
        num_parameters = sum(p.numel() for p in bare.parameters)
        expected = [float(loss) for loss in bare.losses]
    lines = _logged_lines(directory / "run" / "metrics.jsonl")
    difference = _check_losses(point, expected, [line["loss"] for line in lines])
    return {
        "point": asdict(point),
        "num_parameters": num_parameters,
        "loss_difference": difference,
        "memory_checkpoints": [line.get("memory_checkpoint") for line in lines],
        "contenders": summarize(watch, point.steps_per_round),
    }


def _logged_lines(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def _check_losses(point: Point, bare: list[float], bigtrain: list[float]) -> float | None:
    """Largest difference of bigtrain's logged losses from the bare loop's: the same work?"""
    every = LOG_EVERY_STEPS  # a line of metrics has the mean of as many, or of this round's so far
    expected = []
    for end in range(every, len(bare) + 1, every):
        round_begin = (end - 1) // point.steps_per_round * point.steps_per_round
        expected.append(statistics.mean(bare[max(end - every, round_begin) : end]))
    if not bigtrain:
        return None
    difference = max(abs(a - b) for a, b in zip(bigtrain, expected, strict=True))
    if not difference <= (1e-4 if point.dtype == "fp32" else 2e-2):
        raise RuntimeError(f"losses of bigtrain {bigtrain}, of the bare loop {expected}")
    return difference


def summarize(watch: Stopwatch, steps_per_round: int) -> dict[str, dict[str, float]]:
    """Medians over the rounds after the first, per step and against the bare loop."""
    summary = {}
    for name in watch.seconds:
        wall, cpu = watch.seconds[name][1:], watch.cpu_seconds[name][1:]
        ratios = sorted(_ratios(wall, watch.seconds["bare"][1:]))
        summary[name] = {
            "step_seconds": statistics.median(wall) / steps_per_round,
            "ratio": statistics.median(ratios),
            "ratio_lower_quartile": ratios[len(ratios) // 4],
            "ratio_upper_quartile": ratios[-1 - len(ratios) // 4],
            "ratio_of_totals": sum(wall) / sum(watch.seconds["bare"][1:]),
            "cpu_ratio": statistics.median(_ratios(cpu, watch.cpu_seconds["bare"][1:])),
        }
    return summary


def _ratios(values: list[float], bases: list[float]) -> list[float]:
    return [value / base for value, base in zip(values, bases, strict=True)]


def build_parser() -> argparse.ArgumentParser:
    """Return the options; the defaults are those of the README."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=("50m", "tiny"), default="50m", help="of the model")
    parser.add_argument("--zero", type=int, nargs="+", choices=(0, 1, 2), default=[0, 1])
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--rounds", type=int, default=10, help="counted rounds")
    parser.add_argument("--steps-per-round", type=int, default=1, help="steps of a turn")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=CONTENDERS,
        default=list(CONTENDERS),
        help="in addition to the bare loop, which all are compared with",
    )
    parser.add_argument(
        "--memory-every-steps", type=int, help="checkpoint.memory.every_steps of bigtrain"
    )
    parser.add_argument("--output", type=Path, help="JSON file for all results")
    return parser


def measure_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return every point in a process of its own: DeepSpeed and Accelerate keep state in their
    modules."""
    points = [
        Point(
            size=args.size,
            zero_stage=zero_stage,
            accumulation=accumulation,
            micro_batch_size=args.micro_batch_size,
            dtype=args.dtype,
            rounds=args.rounds,
            steps_per_round=args.steps_per_round,
            threads=args.threads,
            contenders=tuple(args.contenders),
            memory_every_steps=args.memory_every_steps,
        )
        for zero_stage in args.zero
        for accumulation in args.accumulation
    ]
    results = []
    for point in points:
        with tempfile.TemporaryDirectory(prefix="cpu_step_") as directory:
            command = [sys.executable, __file__, "--point", json.dumps(asdict(point)), directory]
            finished = subprocess.run(command, capture_output=True, text=True, check=False)
            if finished.returncode:
                sys.exit(f"{finished.stdout}{finished.stderr}\n{point} failed")
            results.append(json.loads((Path(directory) / "result.json").read_text()))
            print_result(results[-1])
    return results


def print_result(result: dict[str, Any]) -> None:
    """Print the rows of one point."""
    point = result["point"]
    for name, row in result["contenders"].items():
        print(
            f"{point['zero_stage']:>4}  {point['accumulation']:>12}  {name:<8}  "
            f"{row['step_seconds']:>10.4f}  {row['ratio']:>6.3f}  "
            f"{row['ratio_lower_quartile']:.3f} .. {row['ratio_upper_quartile']:.3f}  "
            f"{row['cpu_ratio']:>9.3f}",
            flush=True,
        )
    saves = [line for line in result["memory_checkpoints"] if line]
    if saves:
        num_saved = sum(line["saved"] for line in saves)
        blocked = sum(line["blocked_seconds"] for line in saves) / num_saved
        print(f"checkpoints in memory: {num_saved:.0f}, {blocked:.3f} s blocked for each")


def main() -> None:
    """Measure, print the table, and write the JSON where one is asked for."""
    if sys.argv[1:2] == ["--point"]:
        measured, directory = json.loads(sys.argv[2]), Path(sys.argv[3])
        point = Point(**{**measured, "contenders": tuple(measured["contenders"])})
        (directory / "result.json").write_text(json.dumps(measure(point, directory)))
        return
    parser = build_parser()
    args = parser.parse_args()
    numbers = [args.micro_batch_size, args.rounds, args.steps_per_round, args.threads]
    if min(*numbers, *args.accumulation) < 1:
        parser.error("every number but --zero must be at least 1")
    if args.output is not None and not args.output.parent.is_dir():
        parser.error(f"--output {args.output}: no directory {args.output.parent}")
    # Before a child imports torch; DeepSpeed's operators are built by the ninja next to Python.
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    machine = describe_machine(args.threads)
    for key, value in machine.items():
        print(f"{key:<13} {value}")
    print(
        f"{args.size} model, {args.dtype}, micro-batch {args.micro_batch_size} x "
        f"{SIZES[args.size]['sequence_length']} tokens; {args.rounds} rounds in which the "
        f"contenders take turns of {args.steps_per_round} steps in one process\n"
        "zero  accumulation  contender  s per step   ratio  quartiles       CPU ratio"
    )
    results = measure_all(args)
    if args.output is not None:
        temporary = args.output.with_name(f".{args.output.name}.tmp")
        temporary.write_text(json.dumps({"machine": machine, "points": results}, indent=2) + "\n")
        temporary.rename(args.output)


if __name__ == "__main__":
    main()
