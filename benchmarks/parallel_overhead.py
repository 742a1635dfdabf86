"""Cost of parallelism: seconds per optimizer step and bytes exchanged, on two processes.

Every layout trains the same global batch with one thread in each of two processes and is compared
with one process of two threads, measured before and after. The bytes of one step are counted where
they are exchanged, by any caller (torch's ``c10d`` operators), and compared with the layout's
arithmetic: ZeRO 1 to 3 exchange gradients and parameters once (ZeRO 3 the parameters
twice where they are more than stage3_max_live_parameters, which these are not); a tensor-parallel
layer sums its hidden states four times; stages hand hidden states on and gradients back; Ulysses
exchanges queries, keys, values and outputs, and their gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.support.points import SIZES, llama, write_random_dataset
from bigtrain.data.loading.loader import open_training_data
from bigtrain.engine.build import build_engine
from bigtrain.engine.startup.mesh import open_mesh
from bigtrain.engine.startup.process_group import process_group
from bigtrain.models.configuration import load_hf_config
from bigtrain.settings.resolve import resolve_run
from bigtrain.settings.run_config import RunConfig
from bigtrain.system.local_world import run_local_world
from bigtrain.system.world import read_world

FLOAT_BYTES = 4
GLOBAL_BATCH_SIZE = 8
CHOSEN_SIZES = ("10m", "tiny")


@dataclass(frozen=True)
class Layout:
    """One way to train on two processes; `accumulation` micro-batches make a step."""

    name: str
    deepspeed_config: str
    axis: str = "data"
    accumulation: int = 1

    @property
    def micro_batch_size(self) -> int:
        return GLOBAL_BATCH_SIZE // (self.accumulation * (2 if self.axis == "data" else 1))


LAYOUTS = (
    Layout("ZeRO 0", "zero0"),
    Layout("ZeRO 1", "zero1"),
    Layout("ZeRO 2", "zero2"),
    Layout("ZeRO 3", "zero3"),
    Layout("TP 2", "zero0", "tensor"),
    Layout("PP 2", "zero0", "pipeline", accumulation=4),
    Layout("SP 2", "zero0", "sequence"),
)


def formula(layout: Layout, shape: dict[str, int], num_parameters: int) -> int:
    """Return bytes that one process brings into or takes out of the exchanges of one step (of PP:
    that both send)."""
    hidden = layout.micro_batch_size * shape["sequence_length"] * shape["hidden_size"]
    layers, parameters = shape["num_hidden_layers"], num_parameters
    embedding = shape["vocab_size"] * shape["hidden_size"]
    logits = layout.micro_batch_size * shape["sequence_length"] * shape["vocab_size"]
    numbers = {
        "ZeRO 0": parameters,
        "ZeRO 1": 2 * parameters,
        "ZeRO 2": 2 * parameters,
        "ZeRO 3": 2 * parameters,
        # The embedding sums its rows, the head joins its columns and sums its input's gradient.
        "TP 2": 4 * layers * hidden + 2 * hidden + logits,
        # The tied embedding's gradient is of both stages.
        "PP 2": 2 * layout.accumulation * hidden + embedding,
        "SP 2": 8 * layers * hidden // 2 + parameters,
    }
    return FLOAT_BYTES * numbers[layout.name]


class ExchangedBytes(TorchDispatchMode):
    """Counts what is exchanged inside, by operator; received copies of what is sent are not.

    Nor is what a group of one process exchanges with nobody.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes_by_operator: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if (
            func.namespace == "c10d"
            and func._opname not in ("recv_", "barrier")
            and _is_shared(args)
        ):
            # Of a gathering or scattering operator, the full size and not the shard's.
            size = max(sum(t.nbytes for t in _tensors(argument)) for argument in args[:2])
            self.bytes_by_operator[func._opname.strip("_")] += size
        return func(*args, **(kwargs or {}))


def _is_shared(args: tuple[Any, ...]) -> bool:
    (group,) = (
        argument
        for argument in args
        if isinstance(argument, torch.ScriptObject) and argument._type().name() == "ProcessGroup"
    )
    return dist.ProcessGroup.unbox(group).size() > 1


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def run_config(shape: dict[str, int], layout: Layout, data: Path, num_steps: int) -> RunConfig:
    """Return a run of Llama's shape, float32, clipping on."""
    sequence_length = shape["sequence_length"]
    return RunConfig.model_validate(
        {
            "model": {"config": llama(shape, sequence_length)},
            "data": {"path": str(data)},
            "batch": {
                "sequence_length": sequence_length,
                "global_batch_size": GLOBAL_BATCH_SIZE,
                "micro_batch_size": layout.micro_batch_size,
            },
            "train": {"steps": num_steps},
            "parallel": {} if layout.axis in ("data", "none") else {layout.axis: 2},
            "optimizer": {"lr": 1e-4, "clip_norm": 1.0},
            "schedule": {"type": "constant"},
            "precision": {"dtype": "float32"},
            "output": {"directory": "unused"},
        }
    )


def measure(layout: Layout, shape: dict[str, int], data: Path, num_steps: int) -> dict[str, Any]:
    """Return seconds of each step, and what one step exchanged. Collective over the world."""
    world = read_world(os.environ)
    config = run_config(shape, layout, data, num_steps + 2)
    run = resolve_run(config, world.size, layout.deepspeed_config, "cpu")
    mesh = open_mesh(run.topology, world.rank)
    hf_config = load_hf_config(config.model)
    engine = build_engine(config, run.engine, run.plan, hf_config, torch.device("cpu"), mesh)
    batches = open_training_data(config, run.plan, mesh.coordinates.data_rank)
    seconds, losses = [], []
    exchanged = ExchangedBytes()
    for step in range(num_steps + 2):
        micro_batches = batches.step(step * GLOBAL_BATCH_SIZE)
        dist.barrier()
        begun = time.perf_counter()
        # The first step allocates, the second is counted, the others are timed.
        if step == 1:
            with exchanged:
                result = engine.train_step(micro_batches, 1e-4)
        else:
            result = engine.train_step(micro_batches, 1e-4)
        dist.barrier()
        if step > 1:
            seconds.append(time.perf_counter() - begun)
        losses.append(engine.step_loss(result))
    batches.close()
    engine.close()
    everyone: list[Any] = [None] * world.size
    dist.all_gather_object(everyone, dict(exchanged.bytes_by_operator))
    return {"seconds": seconds, "loss": losses[-1], "exchanged": _of_one_process(everyone)}


def _of_one_process(counts: list[dict[str, int]]) -> dict[str, int]:
    """Return bytes of each operator: all messages of one process to another, one process's
    collectives."""
    names = sorted({name for count in counts for name in count})
    return {
        name: (sum if name == "send" else max)(count.get(name, 0) for count in counts)
        for name in names
    }


def work(tasks: list[dict[str, Any]], shape: dict[str, int], data: Path, num_steps: int) -> Any:
    """Return one process of a world: measure all layouts in one process group."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with process_group(read_world(os.environ)):
        return [measure(Layout(**task), shape, data, num_steps) for task in tasks]


def in_world(
    world_size: int, layouts: list[Layout], size: str, data: Path, num_steps: int
) -> list[dict[str, Any]]:
    """Measure `layouts` in `world_size` new processes that have two threads together."""
    task = {
        "tasks": [vars(layout) for layout in layouts],
        "shape": SIZES[size],
        "data": str(data),
        "num_steps": num_steps,
    }
    with tempfile.TemporaryDirectory(prefix="parallel_overhead_") as directory:
        output = Path(directory, "results.json")
        run_local_world(
            world_size,
            [__file__, "--world", json.dumps(task), str(output)],
            {"OMP_NUM_THREADS": str(2 // world_size)},
        )
        results: list[dict[str, Any]] = json.loads(output.read_text())
        return results


def parameters_of(shape: dict[str, int]) -> int:
    """Return the number of parameters of a Llama with tied embeddings and a key-value head for
    every head."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    layer = 4 * hidden**2 + 3 * hidden * inner + 2 * hidden
    return shape["num_hidden_layers"] * layer + shape["vocab_size"] * hidden + hidden


def measure_all(size: str, names: list[str], num_steps: int) -> list[dict[str, Any]]:
    """Return a row for each layout of `names`: seconds, the ratio to one process, bytes by
    operator."""
    shape = SIZES[size]
    layouts = [layout for layout in LAYOUTS if layout.name in names]
    alone = Layout("one process", "zero0", "none")
    with tempfile.TemporaryDirectory(prefix="parallel_overhead_") as directory:
        data = Path(directory, "shards")
        num_tokens = (num_steps + 4) * GLOBAL_BATCH_SIZE * shape["sequence_length"] + 1
        write_random_dataset(data, vocab_size=shape["vocab_size"], num_tokens=num_tokens)
        (before,) = in_world(1, [alone], size, data, num_steps)
        results = in_world(2, layouts, size, data, num_steps)
        (after,) = in_world(1, [alone], size, data, num_steps)
    single = [statistics.median(result["seconds"]) for result in (before, after)]
    base = statistics.mean(single)
    print(f"one process of two threads: {single[0]:.3f} s per step before, {single[1]:.3f} after")
    rows = []
    for layout, result in zip(layouts, results, strict=True):
        if not abs(result["loss"] - before["loss"]) <= 1e-4:
            raise RuntimeError(
                f"{layout.name}: loss {result['loss']}, single process {before['loss']}"
            )
        seconds = statistics.median(result["seconds"])
        expected = formula(layout, shape, parameters_of(shape))
        rows.append(
            {
                "layout": layout.name,
                "step_seconds": seconds,
                "ratio": seconds / base,
                "exchanged": result["exchanged"],
                "formula_bytes": expected,
                "exchanged_ratio": sum(result["exchanged"].values()) / expected,
                "bubble": _bubble(layout),
            }
        )
    return rows


def _bubble(layout: Layout) -> float:
    """Return the part of a step in which a process of two stages waits for the other, at equal
    stages."""
    return 1 / (layout.accumulation + 1) if layout.axis == "pipeline" else 0.0


def print_row(row: dict[str, Any]) -> None:
    """Print one layout, human-readable."""
    largest = {n: b for n, b in row["exchanged"].items() if b >= 0.001 * row["formula_bytes"]}
    operators = ", ".join(f"{name} {count / 1e6:.2f}" for name, count in largest.items())
    print(
        f"{row['layout']:<7} {row['step_seconds']:>8.3f} {row['ratio']:>6.2f} "
        f"{row['ratio'] * (1 - row['bubble']):>14.2f} {row['formula_bytes'] / 1e6:>8.2f} "
        f"{row['exchanged_ratio']:>9.3f}  {operators}"
    )


def main() -> None:
    """Measure and print; ``--world`` is one process of a world."""
    if sys.argv[1:2] == ["--world"]:
        task = json.loads(sys.argv[2])
        results = work(task["tasks"], task["shape"], Path(task["data"]), task["num_steps"])
        if os.environ["RANK"] == "0":
            Path(sys.argv[3]).write_text(json.dumps(results))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=CHOSEN_SIZES, default="10m", help="of the model")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each layout")
    names = [layout.name for layout in LAYOUTS]
    parser.add_argument("--layouts", nargs="+", choices=names, default=names)
    parser.add_argument("--output", type=Path, help="JSON file for all results")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps must be at least 1")
    rows = measure_all(args.size, args.layouts, args.steps)
    stages = next(layout for layout in LAYOUTS if layout.axis == "pipeline")
    print(
        f"{args.size} model, float32, {GLOBAL_BATCH_SIZE} samples per step; PP 2 has "
        f"{stages.accumulation} micro-batches, a bubble of {_bubble(stages):.0%}\n"
        "layout   s/step  ratio  without bubble  formula  measured  MB by operator"
    )
    for row in rows:
        print_row(row)
    if args.output is not None:
        args.output.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
