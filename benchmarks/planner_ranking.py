"""Measured rank of the layout that the planner ranks first, among all layouts.

    python benchmarks/planner_ranking.py [--world-sizes 2 4] [--only llama] [--first 10]
                                         [--hardware FILE] [--output FILE]

Calibrates this machine, plans three small models for two and four processes, trains every legal
layout for a few steps, then the fastest ones and those ranked first again, in turns. `--output` has
every layout's results, a JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.planner_memory import COMMON, GATED
from bigtrain.cli import main as main_command
from bigtrain.commands.plan import PlanArguments, ranked_layouts
from bigtrain.planner.search import Candidate
from bigtrain.python_api.planning import run_and_engine
from bigtrain.system.local_world import run_local_world

LARGER = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **GATED, **LARGER},
    "gpt_neox": {"model_type": "gpt_neox", **COMMON, **LARGER, "num_attention_heads": 4,
                 "vocab_size": 16384},
    "qwen3_moe": {"model_type": "qwen3_moe", **GATED, **LARGER, "head_dim": 64, "num_experts": 4,
                  "num_experts_per_tok": 2, "moe_intermediate_size": 256},
}  # fmt: skip
AGAIN = 6  # of the fastest in the first round, and of those ranked first
# Process groups stay until a world ends, eight threads each: after 140 layouts 1,500 threads.
CASES_OF_A_WORLD = 24


class Ranking:
    """All layouts of one model on a number of processes, and what their steps take."""

    def __init__(self, directory: Path, model: str, world_size: int, hardware: Path) -> None:
        self.directory, self.world_size = directory, world_size
        config = directory / "run.yaml"
        tree = {
            "model": {"path": model, "loss": "plain"},
            "data": {"path": "unused"},
            "batch": {"sequence_length": 128, "global_batch_size": 8},
            "train": {"steps": 3},
            "optimizer": {"lr": 1e-3},
            "precision": {"dtype": "float32"},
            "output": {"directory": "unused"},
        }
        config.write_text(json.dumps(tree))
        gpus = f"{world_size}xCPU"
        args = PlanArguments(
            config=str(config), gpus=gpus, hardware=hardware, nodes_of=world_size,
            as_configured=True,
        )  # fmt: skip
        plan = ranked_layouts(args)
        self.candidates: list[Candidate] = plan.fitting
        self.cases = []
        for key, candidate in enumerate(plan.fitting):
            run, engine = run_and_engine(plan.config, candidate.layout, candidate.loss)
            path = directory / f"{key}.json"
            path.write_text(json.dumps(engine))
            self.cases.append({"key": key, "config": run, "engine": str(path)})

    def measure(self, keys: list[int], steps: int, rounds: int = 1) -> dict[int, float]:
        """Return seconds of a step by layout: the fastest seen."""
        output, order = self.directory / "seconds.jsonl", self.directory / "order.json"
        output.unlink(missing_ok=True)
        cases = [self.cases[key] for _ in range(rounds) for key in keys]
        worker = str(Path(__file__).parent / "support" / "ranking_worker.py")
        for first in range(0, len(cases), CASES_OF_A_WORLD):
            some = cases[first : first + CASES_OF_A_WORLD]
            order.write_text(json.dumps({"cases": some, "steps": steps, "output": str(output)}))
            run_local_world(self.world_size, [worker, str(order)], {})
        fastest: dict[int, float] = {}
        for line in output.read_text().splitlines():
            one = json.loads(line)
            fastest[one["key"]] = min(one["seconds"], fastest.get(one["key"], float("inf")))
        return fastest


def name_of(candidate: Candidate) -> str:
    """Return a layout in a few words."""
    layout = candidate.layout
    recompute = "" if layout.recompute == "none" else f", recompute {layout.gradient_checkpointing}"
    return (
        f"ZeRO {layout.zero_stage} data {layout.data_size} tensor {layout.tensor_size} pipeline "
        f"{layout.pipeline_size} sequence {layout.sequence_size} micro "
        f"{layout.micro_batch_size}{recompute}"
    )


def show(title: str, ranking: Ranking, output: Path | None) -> int:
    """Measure, print, and return the measured rank of the first one."""
    every = ranking.measure(list(range(len(ranking.cases))), steps=2)
    fastest = sorted(every, key=lambda key: every[key])
    again = sorted({*fastest[:AGAIN], *range(min(AGAIN, len(every)))})
    seconds = {**every, **ranking.measure(again, steps=3, rounds=4)}
    order = sorted(again, key=lambda key: seconds[key])
    place = order.index(0) + 1
    if output is not None:
        with output.open("a") as file:
            for key, taken in sorted(seconds.items()):
                candidate = ranking.candidates[key]
                line = {"case": title, "ranked": key + 1, "layout": name_of(candidate),
                        "seconds": taken, "predicted": candidate.time.total,
                        "terms": candidate.time.terms(), "again": key in again}  # fmt: skip
                file.write(json.dumps(line) + "\n")
    print(f"{title}: of {len(every)} layouts, the one ranked first is number {place} measured, at "
          f"{seconds[order[0]] / seconds[0]:.2f} of the fastest's speed")  # fmt: skip
    for key in order[:AGAIN]:
        candidate = ranking.candidates[key]
        print(f"    {seconds[key]:7.3f} s (predicted {candidate.time.total:7.3f}), ranked "
              f"{key + 1:3}: {name_of(candidate)}", flush=True)  # fmt: skip
    return place


def main() -> None:
    """Rank and measure each model at each world size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--only", default="", help="models with this in their names")
    parser.add_argument("--first", type=int, help="measure only so many, those ranked first")
    parser.add_argument("--hardware", type=Path, help="a calibration that was made before")
    parser.add_argument("--output", type=Path, help="results of every layout, appended")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        hardware = args.hardware or Path(name) / "calibration.json"
        if args.hardware is None:
            main_command(["plan", "--calibrate", "--output", str(hardware)])
        places = []
        for model, values in MODELS.items():
            if args.only not in model:
                continue
            path = Path(name) / model
            AutoModelForCausalLM.from_config(AutoConfig.for_model(**values)).save_pretrained(path)
            for size in args.world_sizes:
                directory = path / str(size)
                directory.mkdir()
                ranking = Ranking(directory, str(path), size, hardware)
                if args.first is not None:
                    del ranking.cases[args.first :]
                places.append(show(f"{model}, {size} processes", ranking, args.output))
    print("measured ranks of the layouts ranked first: " + ", ".join(map(str, places)))


if __name__ == "__main__":
    main()
