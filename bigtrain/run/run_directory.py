"""Records of a launch in the run directory: configuration, environment, tokenizer, hosts.

`starts.jsonl` has a line for each launch: {"generation", "time", "step", "samples", "world_size"}:
its generation in ``generations/``, the time at which training began (UTC), and from where.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import bigtrain
from bigtrain.models.configuration import save_configuration
from bigtrain.models.layers.kernels import fast_path_of
from bigtrain.models.layers.plans import CompilationPlan
from bigtrain.models.weights.checksums import BASE_MODEL, Sums, write_sums
from bigtrain.run.preflight import Inputs
from bigtrain.settings.degrees import AXES
from bigtrain.settings.resolve import ResolvedRun
from bigtrain.system.files import has_checkpoints, write_whole
from bigtrain.system.machine import version_of
from bigtrain.system.shipped_files import checkout

TEACHER_MODEL = "teacher_model.json"
"""File of a run directory with checksums of a teacher that is computed in the run."""
MODEL_CONFIG = "model_config"
"""Folder of a run directory with the model's Hugging Face configuration, as it was loaded, and its
generation settings."""
LAYERS = "layers"
"""Key of ``environment.json``: how the layers of the launch compute."""

_PACKAGES = (
    "torch", "deepspeed", "transformers", "peft", "accelerate", "datasets", "numpy", "bitsandbytes",
)  # fmt: skip


def write_run_directory(
    directory: Path,
    run: ResolvedRun,
    inputs: Inputs,
    *,
    hosts: Sequence[str],
    device: torch.device,
    base_model: Sums | None,
    teacher_model: Sums | None = None,
) -> None:
    """Record `run` in its directory. `hosts`: by rank. `base_model`, `teacher_model`: checksums of
    their weight files."""
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", run.config.model_dump(mode="json"))
    _write_json(directory / "deepspeed.json", run.engine.deepspeed)
    _write_json(directory / "environment.json", describe_environment(run, inputs, hosts, device))
    if base_model is not None:
        write_sums(directory / BASE_MODEL, base_model)
    if teacher_model is not None:
        write_sums(directory / TEACHER_MODEL, teacher_model)
    save_configuration(run.config.model, inputs.hf_config, directory / MODEL_CONFIG)
    shutil.copytree(inputs.tokenizer_path, directory / "tokenizer", dirs_exist_ok=True)
    inputs.text_record.save(directory / "tokenizer")


def describe_environment(
    run: ResolvedRun, inputs: Inputs, hosts: Sequence[str], device: torch.device
) -> dict[str, Any]:
    """Return versions, git commit, topology and device, to reproduce the run."""
    return {
        "bigtrain": bigtrain.__version__,
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        **{name: version_of(name) for name in _PACKAGES},
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "host": socket.gethostname(),
        "topology": {"world_size": run.topology.world_size, **run.topology.degrees()},
        "rank_order": list(AXES),
        "hosts": {
            host: [rank for rank, name in enumerate(hosts) if name == host]
            for host in dict.fromkeys(hosts)
        },
        LAYERS: fast_path_of(
            run.config, run.engine, inputs.hf_config, device.type, inputs.model_plan.compilation
        ).words,
        "batch": run.plan.equation(),
        "packing": [report.to_json() for report in inputs.packing],
    }


def layer_lines(
    run: ResolvedRun, hf_config: Any, device_type: str, compilation: CompilationPlan
) -> list[str]:
    """Return lines on how the layers of `run` compute; none on a CPU, where nothing is chosen. A
    line names the change if an earlier launch of the run computed them otherwise: the numbers agree
    up to rounding."""
    if device_type != "cuda":
        return []
    path = fast_path_of(run.config, run.engine, hf_config, device_type, compilation)
    lines = [path.line()]
    directory = Path(run.config.output.directory)
    if has_checkpoints(directory):
        with suppress(OSError, ValueError, KeyError):
            environment = json.loads((directory / "environment.json").read_text(encoding="utf-8"))
            before = environment[LAYERS]
            if before != path.words:
                lines.append(
                    f"layers were {before} in the launch before: rounding differs from here on; "
                    f"model.compile={'on' if 'compiled' in before else 'off'} and "
                    f"model.kernels={'liger' if 'Liger' in before else 'none'} keep it"
                )
    return lines


def _git_commit() -> str | None:
    try:
        result = subprocess.run(
            ["git", "-C", str(checkout()), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def _write_json(path: Path, value: object) -> None:
    write_whole(path, (json.dumps(value, indent=2) + "\n").encode())


FILE = "starts.jsonl"


def note_start(
    directory: Path, *, generation: int | None, step: int, samples: int, world_size: int
) -> None:
    """Append a line to `starts.jsonl`, on the main rank; a kill leaves at worst a partial line, so
    the next launch begins with a newline. Raises OSError."""
    line = {
        "generation": generation,
        "time": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "step": step,
        "samples": samples,
        "world_size": world_size,
    }
    path = directory / FILE
    with path.open("a+b") as file:
        num_bytes = file.seek(0, os.SEEK_END)
        is_line_end = True
        if num_bytes:
            file.seek(num_bytes - 1)
            is_line_end = file.read(1) == b"\n"
        file.write((b"" if is_line_end else b"\n") + json.dumps(line).encode() + b"\n")
