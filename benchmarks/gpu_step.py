"""One GPU: tokens/s, model FLOPs utilization and peak memory over sizes, lengths and settings.

bare      a plain PyTorch loop (see `cpu_step.py`), compiled and recomputed as the point sets
bigtrain  what train.py runs
hf        transformers.Trainer with the same ds_configs/ file
litgpt    its model and the steps of its `pretrain`, where it is installed (pip install litgpt)

Every contender of a point trains the same model on the same batches in a process of its own, since
three of them do not fit into one device. `--peer NAME=TOKENS_PER_SECOND` adds the result of another
trainer (torchtitan), measured on the same device at the first point, to the table.
`--smoke` runs the complete path on a tiny model, on a CPU without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.support import litgpt_loop
from benchmarks.support.contenders import (
    BareLoop,
    Bigtrain,
    Stopwatch,
    describe_machine,
    run_hf_trainer,
    weights_of,
)
from benchmarks.support.litgpt_loop import LitgptLoop
from benchmarks.support.points import Point, resolve_point
from bigtrain.data.loading.loader import open_training_data
from bigtrain.run.diagnostics.profiling import top_ops
from bigtrain.run.diagnostics.step_clock import PartMemory
from bigtrain.run.prediction import predict, utilization_of
from bigtrain.run.preflight import Inputs, inspect_inputs
from bigtrain.run.session import open_session
from bigtrain.settings.resolve import ResolvedRun
from bigtrain.system.units import GIB
from bigtrain.system.world import World

CONTENDERS = ("bare", "bigtrain", "hf", "litgpt")


def measure(point: Point, directory: Path) -> dict[str, Any]:
    """Run the one contender of `point` in this process.

    With ``point.profile`` a round more is recorded: its trace goes to ``directory/trace.json``, and
    ``top_ops`` of the result are lines of a table.
    """
    (contender,) = point.contenders
    run = resolve_point(point, directory)
    inputs = inspect_inputs(run)
    with weights_of(point), open_session(run, World(0, 1, 0)) as context:
        pin = context.device.type == "cuda"
        batches = open_training_data(run.config, run.plan, 0, device_pin=pin)
        watch = Stopwatch(context.device, torch.get_num_threads())
        steps = (
            [batches.step(n * run.plan.global_batch_size) for n in range(point.total_steps + 1)]
            if contender != "bigtrain"
            else []
        )
        top: list[str] = []
        memory = PartMemory(context.device.type)
        if contender == "hf":
            run_hf_trainer(point, run, inputs.hf_config, steps, directory, lambda: None, watch)
        else:
            loop: Callable[[int], None]
            if contender == "bare":
                loop = BareLoop(run, inputs.hf_config, steps, context.device).run
            elif contender == "litgpt":
                loop = LitgptLoop(run, inputs.hf_config, steps).run
            else:
                contestant = Bigtrain(context, inputs, batches)
                memory, loop = contestant.memory, contestant.run
            for _ in range(point.rounds + 1):
                watch.start()
                loop(point.steps_per_round)
                watch.stop(contender)
            if point.profile:
                top = _profile(loop, point.steps_per_round, context.device, directory)
        batches.close()
        counted = watch.seconds[contender][1 : point.rounds + 1]
        seconds = statistics.median(counted) / point.steps_per_round
        tokens_per_second = run.plan.tokens_per_step / seconds
        result = {
            "step_seconds": seconds,
            "tokens_per_second": tokens_per_second,
            "model_flops_utilization": utilization_of(context, inputs.hf_config)(tokens_per_second),
            "peak_gib": memory.peak_gib(),
        }
        if contender == "bigtrain":
            result |= _predicted(run, inputs, context.device)
        return result | ({"top_ops": top} if top else {})


def _predicted(run: ResolvedRun, inputs: Inputs, device: torch.device) -> dict[str, Any]:
    """Return the planner's predictions of the measured run; tokens/s only for known devices."""
    prediction, reason = predict(run, inputs.hf_config, inputs.model_plan, device)
    if prediction is None:
        return {"not_predicted": reason}
    rate = prediction.tokens_per_second
    return {
        "predicted_gib": prediction.memory.allocated / GIB,
        **({} if rate is None else {"predicted_tokens_per_second": rate}),
    }


def _profile(
    loop: Callable[[int], None], num_steps: int, device: torch.device, directory: Path
) -> list[str]:
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, acc_events=True) as recorded:
        loop(num_steps)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    recorded.export_chrome_trace(str(directory / "trace.json"))
    return top_ops(recorded, device.type)


def measure_point(point: Point) -> dict[str, Any]:
    """Return `measure` in a process of its own, or how it failed: one may not fit where another
    does."""
    with tempfile.TemporaryDirectory(prefix="gpu_step_") as directory:
        command = [sys.executable, __file__, "--point", json.dumps(asdict(point)), directory]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        if finished.returncode:
            output = (finished.stdout + finished.stderr).strip().splitlines()
            reason = next((line for line in output if "out of memory" in line.lower()), output[-1])
            return {"failed": reason[:300]}
        result: dict[str, Any] = json.loads((Path(directory) / "result.json").read_text())
        return result


def grid(args: argparse.Namespace) -> list[Point]:
    """Return sizes x lengths x compile x loss x checkpointing; `contenders` of each are still
    open."""
    if args.smoke:
        sizes, lengths = ["tiny"], [32]
    else:
        sizes, lengths = args.sizes, args.sequence_lengths
    return [
        Point(
            size=size,
            zero_stage=args.zero,
            accumulation=args.accumulation,
            micro_batch_size=args.micro_batch_size,
            dtype="bf16",
            rounds=1 if args.smoke else args.rounds,
            steps_per_round=2 if args.smoke else args.steps_per_round,
            threads=torch.get_num_threads(),
            contenders=(),
            sequence_length=length,
            compile=compiled,
            loss=loss,
            checkpointing=checkpointing,
        )
        for size, length, compiled, loss, checkpointing in itertools.product(
            sizes, lengths, args.compile, args.loss, args.checkpointing
        )
    ]


def print_row(point: Point, name: str, row: dict[str, Any], base: float | None) -> None:
    """Print one contender of one point; the ratio is of tokens/s to the bare loop's."""
    place = (
        f"{point.size:<5} {point.sequence_length:>5} {point.compile:<8} {point.loss:<8} "
        f"{point.checkpointing:<5} {name:<11}"
    )
    if "failed" in row:
        print(f"{place} {row['failed']}", flush=True)
        return
    mfu = row.get("model_flops_utilization")
    ratio = row["tokens_per_second"] / base if base else None
    print(
        f"{place} {row['tokens_per_second']:>10.0f} {'' if mfu is None else f'{mfu:.1%}':>6} "
        f"{row.get('peak_gib') or 0:>9.2f} {'' if ratio is None else f'{ratio:.3f}':>6}",
        flush=True,
    )


def draw(results: list[dict[str, Any]], path: Path) -> str:
    """Bars of tokens/s by point and contender into `path`; returns what became of it."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no picture: matplotlib is not installed"
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(name for result in results for name in result["contenders"]))
    figure, axes = pyplot.subplots(figsize=(max(6, len(results)), 4))
    for number, name in enumerate(names):
        rates = [r["contenders"].get(name, {}).get("tokens_per_second", 0) for r in results]
        width = 0.8 / len(names)
        places = [index + number * width for index in range(len(results))]
        axes.bar(places, rates, width, label=name)
    labels = [
        f"{r['point']['size']} {r['point']['sequence_length']}\n{r['point']['compile']} "
        f"{r['point']['loss']} {r['point']['checkpointing']}"
        for r in results
    ]
    axes.set_xticks(range(len(results)), labels, fontsize=6)
    axes.set_ylabel("tokens/s")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    return f"picture: {path}"


def build_parser() -> argparse.ArgumentParser:
    """Return the options; without any, the full grid."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=("1b", "3b"), default=["1b", "3b"])
    parser.add_argument("--sequence-lengths", nargs="+", type=int, default=[4096, 8192])
    parser.add_argument("--compile", nargs="+", choices=("on", "off"), default=["on", "off"])
    parser.add_argument(
        "--loss", nargs="+", choices=("plain", "chunked", "liger"), default=["plain", "chunked"]
    )
    parser.add_argument(
        "--checkpointing", nargs="+", choices=("none", "full"), default=["none", "full"]
    )
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=CONTENDERS,
        default=[name for name in CONTENDERS if name != "litgpt" or litgpt_loop.is_installed()],
    )
    parser.add_argument("--zero", type=int, choices=(0, 1, 2), default=1)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds")
    parser.add_argument("--steps-per-round", type=int, default=5)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=TOKENS_PER_SECOND")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, a CPU will do")
    parser.add_argument("--output", type=Path, help="JSON file; the picture is written next to it")
    return parser


def _peers(parser: argparse.ArgumentParser, given: list[str]) -> dict[str, dict[str, float]]:
    peers = {}
    for text in given:
        name, _, rate = text.partition("=")
        try:
            peers[name] = {"tokens_per_second": float(rate)}
        except ValueError:
            parser.error(f"--peer {text}: give NAME=TOKENS_PER_SECOND, such as torchtitan=14000")
    return peers


def main() -> None:
    """Measure every point, print the table, write JSON and picture where asked."""
    if sys.argv[1:2] == ["--point"]:
        measured, directory = json.loads(sys.argv[2]), Path(sys.argv[3])
        point = Point(**{**measured, "contenders": tuple(measured["contenders"])})
        (directory / "result.json").write_text(json.dumps(measure(point, directory)))
        return
    parser = build_parser()
    args = parser.parse_args()
    peers = _peers(parser, args.peer)
    if args.output is not None and not args.output.parent.is_dir():
        parser.error(f"--output {args.output}: no directory {args.output.parent}")
    if not torch.cuda.is_available() and not args.smoke:
        parser.error("no CUDA device here; --smoke runs the same path on a CPU")
    machine = describe_machine(torch.get_num_threads())
    machine["date"] = datetime.now(UTC).isoformat(timespec="minutes")
    for key, value in machine.items():
        print(f"{key:<13} {value}")
    if not litgpt_loop.is_installed():
        print("litgpt        is not installed: pip install litgpt, and it is measured, too")
    if "torchtitan" not in peers:
        print("torchtitan    is not run from here; --peer torchtitan=... adds its result")
    print("size  tokens compile loss    recompute contender tokens/s    MFU  peak GiB  ratio")
    results = []
    for number, point in enumerate(grid(args)):
        rows: dict[str, Any] = {}
        for name in args.contenders:
            rows[name] = measure_point(Point(**{**asdict(point), "contenders": (name,)}))
            base = rows.get("bare", {}).get("tokens_per_second")
            print_row(point, name, rows[name], base)
        if number == 0:
            for name, row in peers.items():
                rows[name] = row
                print_row(point, name, row, rows.get("bare", {}).get("tokens_per_second"))
        results.append({"point": asdict(point), "contenders": rows})
    if args.output is not None:
        temporary = args.output.with_name(f".{args.output.name}.tmp")
        temporary.write_text(json.dumps({"machine": machine, "points": results}, indent=2) + "\n")
        temporary.rename(args.output)
        print(draw(results, args.output.with_suffix(".png")))


if __name__ == "__main__":
    main()
