"""Run directories with invented metrics, for `bigtrain report`: as runs write them, in a moment."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from bigtrain.metrics.step_metrics import StepMetrics, is_optional
from bigtrain.settings.degrees import AXES
from bigtrain.settings.topology import Topology

NUMBERS: dict[str, Any] = {
    row.name: 1.0
    for row in fields(StepMetrics)
    if row.metadata["kind"] == "number" and not is_optional(row)
}
"""A value for each number that every logged step has, also for those that no test is about."""


def step_line(step: int, **figures: Any) -> dict[str, Any]:
    """Return a logged step as `bigtrain.run.reporting.metrics` writes it."""
    return {
        **NUMBERS,
        "step": step,
        "loss": 2.0 + 6.0 * math.exp(-step / 200),
        "lr": 3e-4,
        "grad_norm": 0.8,
        "tokens": step * 4096,
        "samples": step * 8,
        "tokens_per_second": 8192.0,
        "step_seconds": 0.5,
        "model_flops_utilization": None,
        "memory_gib": 1.5,
        **figures,
    }


def evaluation_line(step: int, loss: float, **sources: float) -> dict[str, Any]:
    """Return an evaluation; `sources`: of a mixture."""
    line: dict[str, Any] = {
        "step": step,
        "held_out_loss": loss,
        "held_out_perplexity": math.exp(loss),
        "held_out_tokens": 2048,
    }
    if sources:
        line["held_out_sources"] = {
            name: {"loss": one, "perplexity": math.exp(one), "tokens": 1024}
            for name, one in sources.items()
        }
    return line


def outer_line(step: int, number: int, sites: list[int], **figures: Any) -> dict[str, Any]:
    """Return an outer step of a run with several sites."""
    return {
        "step": step,
        "outer_step": number,
        "sites": sites,
        "sent_bytes": 1_048_576,
        "seconds": 1.5,
        "waited_seconds": 0.5,
        "change": 1e-3,
        "distance": 0.25,
        **figures,
    }


def write_lines(path: Path, lines: Iterable[dict[str, Any] | str]) -> None:
    """Write JSON objects, or texts unchanged, each on a line."""
    with path.open("w") as file:
        for line in lines:
            file.write((line if isinstance(line, str) else json.dumps(line)) + "\n")


def make_run(directory: Path, lines: Iterable[dict[str, Any] | str], **files: Any) -> Path:
    """Return a run directory; `files`: objects of its JSON files by name without ``.json``."""
    directory.mkdir(parents=True)
    write_lines(directory / "metrics.jsonl", lines)
    defaults = {
        "config": {"train": {"steps": 1000}, "optimizer": {"lr": 3e-4}},
        "deepspeed": {"zero_optimization": {"stage": 1}},
        "environment": environment(),
    }
    for name, value in {**defaults, **files}.items():
        if value is not None:
            (directory / f"{name}.json").write_text(json.dumps(value))
    return directory


def environment(
    data: int = 2, tensor: int = 1, pipeline: int = 1, hosts: int = 1
) -> dict[str, Any]:
    """Versions and topology, as `bigtrain.run.run_directory` writes them."""
    topology = Topology(data_size=data, tensor_size=tensor, pipeline_size=pipeline)
    size = topology.world_size
    each = size // hosts
    return {
        "bigtrain": "0.1.0",
        "torch": "2.13.0",
        "topology": {"world_size": size, **topology.degrees()},
        "rank_order": list(AXES),
        "hosts": {f"node{n}": list(range(n * each, (n + 1) * each)) for n in range(hosts)},
    }


def eventful_lines(num_steps: int = 600, seed: int = 1) -> list[dict[str, Any]]:
    """Everything that a line may have: a mixture's evaluations, all events, gaps, a breakdown,
    experts, outer steps of three sites."""
    draw = random.Random(seed)
    lines: list[dict[str, Any]] = []
    for step in range(1, num_steps + 1):
        bad = step in (160, 161, 402)
        seconds = 0.52 + draw.gauss(0, 0.006) + 0.2 * (300 < step < 330)
        compute = seconds - 0.08
        decay = 0.5 * (1 + math.cos(math.pi * step / num_steps))
        lines.append(
            step_line(
                step,
                loss=None if bad else 2.1 + 5.5 * math.exp(-step / 90) + draw.gauss(0, 0.05),
                lr=3e-4 * min(step / 40, 1.0) * (0.1 + 0.9 * decay),
                grad_norm=None if bad else draw.lognormvariate(-0.3, 0.25) + 6 * (step == 401),
                tokens_per_second=4096 / seconds * 8,
                step_seconds=seconds,
                model_flops_utilization=0.41 * 0.52 / seconds,
                memory_gib=min(58.0 + step * 0.05, 61.4),
                breakdown={
                    "data_seconds": 0.01 + abs(draw.gauss(0, 0.002)),
                    "forward_seconds": compute / 3,
                    "backward_seconds": compute * 2 / 3,
                    "optimizer_seconds": 0.05,
                    "communication_seconds": 0.08,
                    "engine_seconds": 0.02,
                },
                expert_imbalance={
                    f"model.layers.{layer}.mlp.experts": 1 + (layer + 1) / (1 + step / 100)
                    for layer in range(3)
                },
                expert_exchange={
                    "sent_bytes": 3.2e6 + draw.gauss(0, 4e4),
                    "seconds": 0.03 + abs(draw.gauss(0, 0.004)),
                },
                peak_memory_gib_by_phase={
                    "forward": 48.0,
                    "backward": min(57.0 + step * 0.05, 60.2),
                    "optimizer": 52.5,
                },
            )
        )
        if bad:
            lines.append(
                {"step": step, "event": "skipped", "first_sample": step * 8 - 8, "num_samples": 8}
                | {"reason": "loss is not finite", "loss": None, "grad_norm": None}
                | {"consecutive": 2 if step == 161 else 1}
            )
        if step == 320:
            lines.append(
                {"step": step, "event": "straggler", "first_sample": 2552, "num_samples": 8}
                | {"rank": 5, "host": "node0", "work_seconds": 0.71, "median_seconds": 0.36}
            )
        if step == 402:
            lines.append(
                {"step": 405, "event": "rolled_back", "first_sample": 3200, "num_samples": 40}
                | {"to_step": 400}
            )
        if step % 25 == 0:
            away = 200 <= step < 300
            distance = 0.02 * math.exp(-step / 300) + 0.002 * draw.random()
            lines.append(
                outer_line(step, step // 25, [0, 2] if away else [0, 1, 2], distance=distance)
                | {"change": distance / 3, "seconds": 1.2 + draw.random()}
            )
        if step % 50 == 0:
            loss = 2.15 + 5.5 * math.exp(-step / 90)
            lines.append(evaluation_line(step, loss, code=loss - 0.4, web=loss + 0.2))
    return lines


def eventful_run(directory: Path, num_steps: int = 600, seed: int = 1, **files: Any) -> Path:
    """Return a run to which everything has happened: 16 ranks, two restarts, a hang, a
    prediction."""
    prediction = {
        "step_seconds": 0.49,
        "tokens_per_second": 66900.0,
        "peak_memory_gib": 63.2,
        "terms": {
            "data": 0.005,
            "forward": 0.11,
            "backward": 0.22,
            "optimizer": 0.045,
            "communication": 0.09,
            "engine": 0.02,
        },
        "memory_terms": {
            "parameters": 15.0,
            "gradients": 15.0,
            "optimizer states": 18.2,
            "activations": 13.0,
            "buckets": 2.0,
        },
    }
    given = {
        "environment": environment(data=2, tensor=4, pipeline=2, hosts=2),
        "config": {"train": {"steps": num_steps}, "optimizer": {"lr": 3e-4}, "seed": seed},
        "prediction": prediction,
        **files,
    }
    make_run(directory, eventful_lines(num_steps, seed), **given)
    starts = [
        {"generation": n + 1, "time": f"2026-11-2{n} 10:00:00 UTC", "step": step}
        | {"samples": step * 8, "world_size": 16}
        for n, step in enumerate((0, 200, 450))
    ]
    write_lines(directory / "starts.jsonl", starts)
    (directory / "generations").mkdir()
    for start in starts:
        end = ".json" if start["generation"] == 3 else ".superseded.json"
        name = f"{start['generation']:08d}{end}"
        holder = {"generation": start["generation"], "host": "node0", "since": start["time"]}
        (directory / "generations" / name).write_text(json.dumps(holder))
    hang = directory / "hangs" / "step-00000247-ab12cd"
    hang.mkdir(parents=True)
    (hang / "report.txt").write_text(
        "watchdog: no progress for 600 s\nlagging:\n"
        "  rank 11 on node1 (process 4711): step 247, backward, outside of collectives (the "
        "others wait for it in a collective)\n"
    )
    return directory
