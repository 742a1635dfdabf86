"""Cost of expert parallelism: seconds per optimizer step and bytes exchanged, on two processes.

A small Qwen3-MoE trains the same global batch with its experts divided (EP 2, ZeRO 1), sharded like
every other matrix (TP 2), and complete on each process (ZeRO 1), which the others are compared
with. They take turns. What EP 2 sends to the other rank is what a run logs of it
(`expert_exchange`), and is set against the planner's formula (`bigtrain.planner.step_time`): in
each of a layer's passes all chosen tokens go to their experts and come back, of which ``1 - 1 / 2``
leave the rank where the router chooses evenly. All bytes are counted where they are exchanged, as
parallel_overhead.py does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.distributed as dist

from benchmarks.parallel_overhead import ExchangedBytes
from benchmarks.support.points import write_random_dataset
from bigtrain.data.loading.loader import open_training_data
from bigtrain.engine.build import build_engine
from bigtrain.engine.startup.mesh import open_mesh
from bigtrain.engine.startup.process_group import process_group
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.tracing.traced_costs import model_costs
from bigtrain.planner.seconds.communication import Group
from bigtrain.planner.seconds.layer import bytes_to_experts
from bigtrain.settings.resolve import resolve_run
from bigtrain.settings.run_config import RunConfig
from bigtrain.system.local_world import run_local_world
from bigtrain.system.world import read_world

FLOAT_BYTES = 4
WORLD_SIZE = 2
GLOBAL_BATCH_SIZE = 8
# The loss of all layouts at the last step, in nats: they train the same.
SAME_LOSS = 1e-4

SHAPES: dict[str, dict[str, int]] = {
    "small": {
        "vocab_size": 4096,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 512,
        "max_position_embeddings": 256,
    },
    "tiny": {
        "vocab_size": 128,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "max_position_embeddings": 64,
    },
}


@dataclass(frozen=True)
class Layout:
    """One way to train on two processes; `axis`: the degree of two, none: only data."""

    name: str
    axis: str

    @property
    def micro_batch_size(self) -> int:
        return GLOBAL_BATCH_SIZE // (1 if self.axis == "tensor" else WORLD_SIZE)


LAYOUTS = (Layout("ZeRO 1", ""), Layout("EP 2", "expert"), Layout("TP 2", "tensor"))


def formula_of_experts(config: RunConfig) -> float:
    """Return bytes that a rank of EP 2 sends to the other in a step, as the planner has it: where
    the router chooses evenly."""
    model, _ = model_costs(config)
    tokens = GLOBAL_BATCH_SIZE // WORLD_SIZE * config.batch.sequence_length
    hidden = tokens * model.hidden_size * FLOAT_BYTES
    rows = sum(bytes_to_experts(model.kinds[kind], hidden, 1) for kind in model.layers)
    # There and back, in the forward and in the backward pass.
    return 4 * Group(WORLD_SIZE, WORLD_SIZE).sent_bytes(rows)


def run_config(shape: dict[str, int], layout: Layout, data: Path, num_steps: int) -> RunConfig:
    """Return a run of Qwen3-MoE's kind, float32, clipping on."""
    return RunConfig.model_validate(
        {
            "model": {"config": {"model_type": "qwen3_moe", "bos_token_id": None, **shape}},
            "data": {"path": str(data)},
            "batch": {
                "sequence_length": shape["max_position_embeddings"],
                "global_batch_size": GLOBAL_BATCH_SIZE,
                "micro_batch_size": layout.micro_batch_size,
            },
            "train": {"steps": num_steps},
            "parallel": {layout.axis: 2} if layout.axis else {},
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
    run = resolve_run(config, world.size, "zero1", "cpu")
    mesh = open_mesh(run.topology, world.rank)
    hf_config = load_hf_config(config.model)
    engine = build_engine(config, run.engine, run.plan, hf_config, torch.device("cpu"), mesh)
    batches = open_training_data(config, run.plan, mesh.coordinates.data_rank)
    seconds: list[float] = []
    exchanged, load, loss = ExchangedBytes(), None, 0.0
    for step in range(num_steps + 2):
        micro_batches = batches.step(step * GLOBAL_BATCH_SIZE)
        dist.barrier()
        begun = time.perf_counter()
        # The first step allocates, the second is counted, the others are timed.
        if step == 1:
            with exchanged:
                result = engine.train_step(micro_batches, 1e-4, observe=True)
            load = engine.expert_load.read()
        else:
            result = engine.train_step(micro_batches, 1e-4)
        dist.barrier()
        if step > 1:
            seconds.append(time.perf_counter() - begun)
        loss = engine.step_loss(result)
    batches.close()
    engine.close()
    assert load is not None
    return {
        "seconds": seconds,
        "loss": loss,
        "exchanged": dict(exchanged.bytes_by_operator),
        "sent_bytes": load.sent_bytes,
        "imbalance": max(load.imbalance.values()),
    }


def work(shape: dict[str, int], data: Path, num_steps: int, num_rounds: int) -> Any:
    """Return one process of the world: all layouts in turn, so many times."""
    torch.set_num_threads(1)
    with process_group(read_world(os.environ)):
        return [
            {layout.name: measure(layout, shape, data, num_steps) for layout in LAYOUTS}
            for _ in range(num_rounds)
        ]


def measure_all(size: str, num_steps: int, num_rounds: int) -> list[dict[str, Any]]:
    """Return a row for each layout."""
    shape = SHAPES[size]
    with tempfile.TemporaryDirectory(prefix="experts_") as directory:
        data, output = Path(directory, "shards"), Path(directory, "results.json")
        num_tokens = (num_steps + 4) * GLOBAL_BATCH_SIZE * shape["max_position_embeddings"] + 1
        write_random_dataset(data, vocab_size=shape["vocab_size"], num_tokens=num_tokens)
        task = {"shape": shape, "data": str(data), "steps": num_steps, "rounds": num_rounds}
        words = [__file__, "--world", json.dumps(task), str(output)]
        run_local_world(WORLD_SIZE, words, {"OMP_NUM_THREADS": "1"})
        rounds: list[dict[str, Any]] = json.loads(output.read_text())
        formula = formula_of_experts(run_config(shape, LAYOUTS[1], data, num_steps))
    whole = LAYOUTS[0].name
    rows = []
    for layout in LAYOUTS:
        results = [one[layout.name] for one in rounds]
        if not all(abs(one["loss"] - rounds[0][whole]["loss"]) <= SAME_LOSS for one in results):
            raise RuntimeError(f"{layout.name}: loss {results[0]['loss']}, differs from {whole}")
        # Of each round, so that both of a ratio had the same of what else the machine does.
        ratios = [
            statistics.median(one[layout.name]["seconds"])
            / statistics.median(one[whole]["seconds"])
            for one in rounds
        ]
        sent = results[0]["sent_bytes"]
        rows.append(
            {
                "layout": layout.name,
                "step_seconds": statistics.median(s for one in results for s in one["seconds"]),
                "ratio": statistics.median(ratios),
                "exchanged": results[0]["exchanged"],
                "imbalance": results[0]["imbalance"],
                "sent_bytes": sent,
                "sent_of_formula": None if sent is None else sent / formula,
            }
        )
    return rows


def print_row(row: dict[str, Any], whole_bytes: int) -> None:
    """Print one layout, human-readable."""
    total = sum(row["exchanged"].values())
    operators = ", ".join(
        f"{name} {n / 1e6:.2f}" for name, n in row["exchanged"].items() if n > 1e3
    )
    formula = row["sent_of_formula"]
    print(
        f"{row['layout']:<7} {row['step_seconds']:>8.3f} {row['ratio']:>6.2f} "
        f"{total / whole_bytes:>6.2f} {'' if formula is None else f'{formula:.3f}':>8}  {operators}"
    )


def main() -> None:
    """Measure and print; ``--world`` is one process of a world."""
    if sys.argv[1:2] == ["--world"]:
        task = json.loads(sys.argv[2])
        results = work(task["shape"], Path(task["data"]), task["steps"], task["rounds"])
        if os.environ["RANK"] == "0":
            Path(sys.argv[3]).write_text(json.dumps(results))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=list(SHAPES), default="small", help="of the model")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each layout")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each layout")
    parser.add_argument("--output", type=Path, help="JSON file for all results")
    args = parser.parse_args()
    if min(args.steps, args.rounds) < 1:
        parser.error("--steps and --rounds must be at least 1")
    rows = measure_all(args.size, args.steps, args.rounds)
    print(
        f"{args.size} Qwen3-MoE, float32, {GLOBAL_BATCH_SIZE} samples per step, two processes of "
        f"one thread; busiest expert {rows[0]['imbalance']:.2f} x the mean\n"
        "layout   s/step  ratio  bytes  formula  MB by operator of one process"
    )
    for row in rows:
        print_row(row, sum(rows[0]["exchanged"].values()))
    if args.output is not None:
        args.output.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
