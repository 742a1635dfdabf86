"""The host time of the engine: CPU seconds of an optimizer step above a bare loop, per parameter.

A Llama of many layers that are too small to compute for long trains on each rank by turns in a
plain PyTorch loop and in bigtrain's engine. What is measured is the CPU time of the thread that
trains, with one thread for the arithmetic: waiting for other ranks does not count. The
difference, divided by the number of parameters (tensors), is what a step costs the engine in
Python; on a GPU it is what the host must do while the device computes.

The bare loop has norms and an update of its own, which are subtracted with it: clipping takes a
norm of each parameter there, and AdamW updates tensor by tensor. ZeRO's optimizer updates a few
flat tensors instead. The cost of that is measured too, as the floor: the bare
loop with ZeRO's arithmetic instead of its own, in plain PyTorch, and a hook on each parameter that
does nothing.

``--deepspeed-hooks`` leaves ZeRO-3 the hooks that `bigtrain.engine.deepspeed_patches.zero3_hooks`
replaces, and ZeRO 1 and 2 what `bigtrain.engine.deepspeed_patches.step` skips; ``--without NAME``
turns one function of these modules off; ``--versus N`` measures with and without by turns, N times,
and prints the least of each. ``--each N`` does so for each of `SPEED_PATCHES`, and prints what it
saves per parameter and per million elements; of few large parameters (``--layers 4 --hidden-size
1024``) the latter is passes over memory, of many small ones the former is Python. ``--profile
FILE`` writes a cProfile of five more steps of the engine.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors

from benchmarks.support.contenders import BareLoop
from benchmarks.support.points import llama, write_random_dataset
from bigtrain.data.loading.loader import open_training_data
from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.engine.build import build_engine
from bigtrain.engine.deepspeed_patches import step, zero3_hooks
from bigtrain.engine.startup.mesh import open_mesh
from bigtrain.engine.startup.process_group import process_group
from bigtrain.models.configuration import load_hf_config
from bigtrain.settings.deepspeed.engine_config import find_deepspeed_config
from bigtrain.settings.resolve import ResolvedRun, resolve_run
from bigtrain.settings.run_config import RunConfig
from bigtrain.system.local_world import run_local_world
from bigtrain.system.world import read_world

PATCH_MODULES = step, zero3_hooks
ALL_PATCHES = "replace_hooks", "skip_redundant_work_of_zero12"
TOKENS = 8
VOCAB_SIZE = 256
WARM_UP_STEPS = 3
PROFILED_STEPS = 5


@dataclass(frozen=True)
class Task:
    """Measurement of one world. persistent: elements up to which ZeRO-3 does not partition.

    without: names of functions in `PATCH_MODULES` that do nothing. model: llama, or gpt2, which has
    biases and norms with two parameters.
    """

    zero_stage: int
    num_layers: int
    hidden_size: int
    num_steps: int
    persistent: int
    without: tuple[str, ...]
    model: str = "llama"
    dtype: str = "float32"
    profile: str | None = None

    @property
    def total_steps(self) -> int:
        return WARM_UP_STEPS + self.num_steps + (PROFILED_STEPS if self.profile else 0)


def run_config(task: Task, data: Path, world_size: int) -> RunConfig:
    """Return one short sample per rank and step."""
    gpt2 = {
        "model_type": "gpt2",
        "vocab_size": VOCAB_SIZE,
        "n_embd": task.hidden_size,
        "n_layer": task.num_layers,
        "n_head": 2,
        "n_positions": TOKENS,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        **dict.fromkeys(("bos_token_id", "eos_token_id")),
    }
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": task.hidden_size,
        "intermediate_size": 2 * task.hidden_size,
        "num_hidden_layers": task.num_layers,
        "num_attention_heads": 2,
    }
    return RunConfig.model_validate(
        {
            "model": {"config": gpt2 if task.model == "gpt2" else llama(shape, TOKENS)},
            "data": {"path": str(data)},
            "batch": {
                "sequence_length": TOKENS,
                "global_batch_size": world_size,
                "micro_batch_size": 1,
            },
            "train": {"steps": task.total_steps},
            "optimizer": {"lr": 1e-4, "clip_norm": 1.0},
            "schedule": {"type": "constant"},
            "precision": {"dtype": task.dtype},
            "output": {"directory": "unused"},
        }
    )


class FlatLoop(BareLoop):
    """The bare loop with the arithmetic of ZeRO on one rank: gradients put together and masters
    updated as flat tensors, norms in float64, and a hook on each parameter, which does nothing."""

    def __init__(
        self, run: ResolvedRun, hf_config: Any, steps: list[list[MicroBatch]], device: torch.device
    ) -> None:
        super().__init__(run, hf_config, steps, device)
        self.groups = [list(group["params"]) for group in self.optimizer.param_groups]
        self.flats, self.masters = [], []
        for members, group in zip(self.groups, self.optimizer.param_groups, strict=True):
            flat = _flatten_dense_tensors([p.detach() for p in members])
            for parameter, part in zip(members, self._split(flat, members), strict=True):
                parameter.data = part.view_as(parameter)
                parameter.register_post_accumulate_grad_hook(_do_nothing)
            self.flats.append(flat)
            self.masters.append(flat.float().clone())
            group["params"] = [self.masters[-1]]

    @staticmethod
    def _split(flat: torch.Tensor, members: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return flat.split([p.numel() for p in members])

    @torch.no_grad()
    def update(self) -> None:
        squares = []
        for members, master in zip(self.groups, self.masters, strict=True):
            bucket = _flatten_dense_tensors([p.grad for p in members])
            master.grad = torch.empty_like(master)
            torch.cat(self._split(bucket, members), out=master.grad)
            parts = self._split(master.grad, members)
            norms = torch._foreach_norm(parts, 2.0, dtype=torch.float64)
            squares.append(torch.stack(norms).pow(2.0).sum())
        norm = torch.stack(squares).sum().sqrt()
        for master in self.masters:
            master.grad.mul_((self.clip_norm / (norm + 1e-6)).clamp(max=1.0).float())
        self.optimizer.step()
        for members, flat, master in zip(self.groups, self.flats, self.masters, strict=True):
            flat.copy_(master)
            for parameter in (*members, master):
                parameter.grad = None


def _do_nothing(_parameter: torch.Tensor) -> None:
    pass


def measure(task: Task, data: Path, deepspeed_config: Path) -> dict[str, Any]:
    """Return seconds of both loops' steps on this rank. Collective over the world."""
    torch.set_num_threads(1)
    world = read_world(os.environ)
    with process_group(world), ExitStack() as turned_off:
        for name in task.without:
            owner = next(module for module in PATCH_MODULES if hasattr(module, name))
            turned_off.enter_context(mock.patch.object(owner, name, return_value=False))
        config = run_config(task, data, world.size)
        run = resolve_run(config, world.size, str(deepspeed_config), "cpu")
        mesh, device = open_mesh(run.topology, world.rank), torch.device("cpu")
        hf_config = load_hf_config(config.model)
        engine = build_engine(config, run.engine, run.plan, hf_config, device, mesh)
        batches = open_training_data(config, run.plan, mesh.coordinates.data_rank)
        steps = [batches.step(number * world.size) for number in range(task.total_steps)]
        batches.close()
        bare = BareLoop(run, hf_config, steps, device)
        floor = FlatLoop(run, hf_config, steps, device)
        seconds: dict[str, list[float]] = {"bare": [], "engine": [], "floor": []}
        results = []
        for number in range(WARM_UP_STEPS + task.num_steps):
            dist.barrier()
            began = time.thread_time()
            bare.run(1)
            clocks = [began, time.thread_time()]
            results.append(engine.train_step(steps[number], config.optimizer.lr))
            clocks.append(time.thread_time())
            floor.run(1)
            clocks.append(time.thread_time())
            if number >= WARM_UP_STEPS:
                for name, (start, end) in zip(seconds, pairwise(clocks), strict=True):
                    seconds[name].append(end - start)
        if task.profile:
            profile = cProfile.Profile()
            for micro_batches in steps[-PROFILED_STEPS:]:
                profile.runcall(engine.train_step, micro_batches, config.optimizer.lr)
            if world.is_main:
                profile.dump_stats(task.profile)
        loss = engine.step_loss(results[-1])
        engine.close()
    return {
        "seconds": seconds,
        "loss": loss,
        "num_parameters": len(list(bare.model.parameters())),
        "num_elements": sum(p.numel() for p in bare.model.parameters()),
    }


def in_world(task: Task, world_size: int) -> dict[str, Any]:
    """Measure `task` in new processes; return the results of the main rank."""
    with tempfile.TemporaryDirectory(prefix="host_time_") as directory:
        data, output = Path(directory, "shards"), Path(directory, "result.json")
        num_tokens = (task.total_steps + 1) * TOKENS * world_size + 1
        write_random_dataset(data, vocab_size=VOCAB_SIZE, num_tokens=num_tokens)
        chosen = json.loads(find_deepspeed_config(f"zero{task.zero_stage}").read_text())
        if task.zero_stage == 3:
            chosen["zero_optimization"]["stage3_param_persistence_threshold"] = task.persistent
        deepspeed_config = Path(directory, "deepspeed.json")
        deepspeed_config.write_text(json.dumps(chosen))
        words = [json.dumps(asdict(task)), str(data), str(deepspeed_config), str(output)]
        run_local_world(world_size, [__file__, "--world", *words], {})
        result: dict[str, Any] = json.loads(output.read_text())
    bare, engine, floor = (
        1e3 * statistics.median(result["seconds"][name]) for name in ("bare", "engine", "floor")
    )
    return {
        **asdict(task),
        "world_size": world_size,
        "num_parameters": result["num_parameters"],
        "num_elements": result["num_elements"],
        "bare_ms": bare,
        "engine_ms": engine,
        "floor_ms": floor,
        "ms_per_parameter": (engine - bare) / result["num_parameters"],
        "floor_ms_per_parameter": (floor - bare) / result["num_parameters"],
        "loss": result["loss"],
    }


def versus(task: Task, world_size: int, rounds: int) -> list[dict[str, Any]]:
    """Return the round without the named patches that takes the least time per parameter, and the
    one with all patches."""
    both = [task, replace(task, without=())]
    results = [[in_world(one, world_size) for one in both] for _ in range(rounds)]
    return [
        min(rows, key=lambda row: float(row["ms_per_parameter"]))
        for rows in zip(*results, strict=True)
    ]


def each_patch(task: Task, world_size: int, rounds: int) -> list[dict[str, Any]]:
    """Return the least row of all patches and of all but one, for each of the stage. By turns."""
    patches = [patch for patch in step.SPEED_PATCHES if task.zero_stage in patch.stages]
    tasks = [task, *(replace(task, without=(patch.function,)) for patch in patches)]
    results = [[in_world(one, world_size) for one in tasks] for _ in range(rounds)]
    rows = [
        min(turns, key=lambda row: float(row["engine_ms"])) for turns in zip(*results, strict=True)
    ]
    for patch, row in zip(patches, rows[1:], strict=True):
        row["patch"] = patch.name
        row["saved_ms"] = row["engine_ms"] - rows[0]["engine_ms"]
    return rows


def _show_each(rows: list[dict[str, Any]]) -> None:
    for row in rows[1:]:
        print(
            f"{row['zero_stage']:>4}  {row['world_size']:>5}  {row['patch']:<36}  "
            f"{row['saved_ms'] / row['num_parameters']:>8.4f} ms per parameter  "
            f"{1e6 * row['saved_ms'] / row['num_elements']:>8.3f} ms per million elements",
            flush=True,
        )


def main() -> None:
    """Measure and print; ``--world`` is one process of a world."""
    if sys.argv[1:2] == ["--world"]:
        task, data, deepspeed_config, output = sys.argv[2:]
        results = measure(Task(**json.loads(task)), Path(data), Path(deepspeed_config))
        if os.environ["RANK"] == "0":
            Path(output).write_text(json.dumps(results))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--zero", type=int, nargs="+", choices=range(4), default=[0, 1, 2, 3])
    parser.add_argument("--world-size", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--hidden-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=12, help="timed steps")
    parser.add_argument(
        "--persistent", type=int, default=1000, help="elements that ZeRO-3 does not partition"
    )
    parser.add_argument("--model", choices=("llama", "gpt2"), default="llama")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="bfloat16: the bare loop casts weights by autocast, which the engine need not",
    )
    parser.add_argument("--deepspeed-hooks", action="store_true", help="DeepSpeed's own code")
    parser.add_argument(
        "--without", nargs="+", default=[], metavar="NAME", help="functions of patches to turn off"
    )
    parser.add_argument("--versus", type=int, metavar="N", help="without and with them, N times")
    parser.add_argument("--each", type=int, metavar="N", help="all but each patch, N times")
    parser.add_argument("--profile", help="file for cProfile's statistics, of the last world")
    parser.add_argument("--output", type=Path, help="JSON file for all results")
    args = parser.parse_args()
    without = tuple(args.without)
    if args.deepspeed_hooks or (args.versus and not without):
        without = ALL_PATCHES
    if not args.each:
        print("zero  ranks  whose      bare ms  engine ms  ms per parameter  floor  loss")
    rows = []
    for zero_stage in args.zero:
        for world_size in args.world_size:
            task = Task(
                zero_stage=zero_stage,
                num_layers=args.layers,
                hidden_size=args.hidden_size,
                num_steps=args.steps,
                persistent=args.persistent,
                without=without,
                model=args.model,
                dtype=args.dtype,
                profile=args.profile,
            )
            if args.each:
                results = each_patch(task, world_size, args.each)
            elif args.versus:
                results = versus(task, world_size, args.versus)
            else:
                results = [in_world(task, world_size)]
            rows += results
            if args.each:
                _show_each(results)
            else:
                _show(results)
    if args.output is not None:
        args.output.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def _show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        whose = "reduced" if row["without"] else "bigtrain"
        print(
            f"{row['zero_stage']:>4}  {row['world_size']:>5}  {whose:<9}  {row['bare_ms']:>7.1f}  "
            f"{row['engine_ms']:>9.1f}  {row['ms_per_parameter']:>16.4f}  "
            f"{row['floor_ms_per_parameter']:.4f}  {row['loss']!r}",
            flush=True,
        )
    if len(rows) == 2:
        theirs, ours = (row["ms_per_parameter"] for row in rows)
        print(f"             ratio {ours / theirs:.2f}", flush=True)


if __name__ == "__main__":
    main()
