"""Part on checkpoints: saved while training continues, resumed to the same bits, exported."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from benchmarks.gpu_check.lives import metrics_of, train, write_run
from benchmarks.gpu_check.results import Part, Setup
from bigtrain.engine.checkpoint.io import read_full
from bigtrain.run.checkpointing.checkpoints import TENSORS, checkpoint_path

STEPS, SAVED = 8, 4


def checkpoints(setup: Setup, part: Part) -> None:
    """Compare an undisturbed run with one that is killed after a save and started again."""
    more = {"checkpoint.every_steps": SAVED, "checkpoint.keep_last": 5}
    directories = [setup.directory / name for name in ("undisturbed", "killed")]
    limit = setup.seconds / 3
    undisturbed = train(
        setup,
        "undisturbed",
        write_run(setup, "undisturbed", **more, **{"output.export": True}),
        limit_seconds=limit,
    )
    part.check(
        undisturbed.code == 0,
        f"the undisturbed run ended with {undisturbed.code}: {_end(undisturbed.output)}",
    )
    arguments = write_run(setup, "killed", **more)
    killed = train(setup, "killed", arguments, limit_seconds=limit, die_after=SAVED)
    part.check(killed.code == -9, f"the run that was to be killed ended with {killed.code}")
    resumed = train(setup, "killed", arguments, limit_seconds=limit)
    part.check(resumed.code == 0, f"the second start ended with {resumed.code}")
    if part.status == "failed":
        return
    log = (directories[1] / "log.txt").read_text()
    part.check(f"resumed at step {SAVED}" in log, f"it did not resume at step {SAVED}")
    exported = directories[0] / "hf" / "config.json"
    part.check(exported.exists(), "the export is not there")
    for step in (SAVED, STEPS):
        _compare(part, step, *directories)
    first, second = (metrics_of(directory) for directory in directories)
    for step in range(SAVED + 1, STEPS + 1):
        alike = all(first[step][key] == second[step][key] for key in ("loss", "grad_norm"))
        part.check(alike, f"step {step}: other loss or gradient norm after the resume")
    part.figures |= {
        "saved_gib": _bytes(checkpoint_path(directories[0], STEPS)) / 2**30,
        "stalls_s": [float(text) for text in re.findall(r"blocked for ([\d.]+) s", log)],
    }


def _compare(part: Part, step: int, first: Path, second: Path) -> None:
    """Compare all tensors of two runs' checkpoints of `step`, bit for bit."""
    one, other = (read_full(checkpoint_path(run, step) / TENSORS) for run in (first, second))
    different = [key for key in one if not torch.equal(one[key], other[key])]
    part.figures[f"tensors_at_{step}"] = len(one)
    part.check(one.keys() == other.keys(), f"step {step}: other tensors")
    part.check(
        not different,
        f"step {step}: {len(different)} of {len(one)} tensors differ, {different[:1]} among them",
    )


def _bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def _end(output: str) -> str:
    return " / ".join(output.strip().splitlines()[-2:])[:300]
