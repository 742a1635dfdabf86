"""The core trains from shards; five siblings meet it in files, environment variables and one
protocol (docs/architecture.md)."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bigtrain.cli import main
from bigtrain.data.tokenizers.training import train_tokenizer
from tests.architecture.test_layers import MODULES, imports_of
from tests.support.datasets import write_dataset
from tests.support.worlds import ROOT

# Folders and modules of bigtrain/ that the core runs without.
SIBLINGS = {
    # Writes shards and manifest.json, which the core reads.
    "data preparation": (
        "data.chat",
        "data.documents",
        "data.samples.kept_documents",
        "data.shards.inspection",
        "data.shards.mask_display",
        "data.shards.writer",
        "data.tokenize_job",
        "data.tokenizers.equivalence",
        "data.tokenizers.training",
    ),
    # Makes the outer steps that the loop asks for (`bigtrain.run.loop.OuterSteps`).
    "sites": ("sites",),
    # Chooses a layout and starts processes: environment variables, exit codes.
    "launching": (
        "engine.calibrate_device",
        "engine.calibrate_engine",
        "forked_rank",
        "launchers",
        "planner.plan_text",
        "planner.search",
    ),
    # Reads metrics.jsonl and the run directory.
    "report": ("report",),
    # Compares runs with plain loops, and predictions with published measurements.
    "proof": ("parity", "planner.published"),
}
# What a user calls: it loads what a call needs, from the core or from a sibling.
SURFACE = (
    "__main__",
    "cli",
    "commands",
    "python_api.new_run",
    "python_api.new_run_inputs",
    "python_api.planning",
    "python_api.proposals",
    "python_api.results",
    "python_api.scoring",
    "python_api.shards",
    "python_api.tokenizing",
)
# The only module of the core that imports a sibling: where ``sites`` is set.
DOORS = {"bigtrain.run.outer_steps": "sites"}
MOST_MODULES = 252
"""Of bigtrain, that are loaded by a run without options whose plan is in the cache."""

# train.py, and then the names of the modules that it has loaded.
PROGRAM = """
import json, os, sys
from bigtrain.train import main
code = main(sys.argv[2:])
names = [name for name in sys.modules if name.partition(".")[0] == "bigtrain"]
open(sys.argv[1], "w").write(json.dumps(names))
sys.stdout.flush()
os._exit(code)
"""


def part_of(module: str) -> str:
    """Return "core", "surface" or the name of the sibling that `module` belongs to."""
    parts = {**SIBLINGS, "surface": SURFACE}
    for part, names in parts.items():
        if any(f"{module}.".startswith(f"bigtrain.{name}.") for name in names):
            return part
    return "core"


def test_the_core_meets_the_siblings_at_its_doors_only() -> None:
    """Also inside functions. A sibling may import the core, and no other sibling."""
    wrong = []
    for module, path in MODULES.items():
        part = part_of(module)
        for line, name in imports_of(path):
            target = part_of(name) if name in MODULES else "core"
            if part != "surface" and target not in ("core", part, DOORS.get(module)):
                wrong.append(f"{path}:{line}: {part} imports {name} of {target}")
    assert wrong == []


def test_siblings_and_doors_exist() -> None:
    named = [name for names in (*SIBLINGS.values(), SURFACE) for name in names]
    assert [name for name in named if f"bigtrain.{name}" not in MODULES] == []
    used = {
        (module, part_of(name))
        for module in DOORS
        for _, name in imports_of(MODULES[module])
        if name in MODULES
    }
    assert set(DOORS.items()) <= used


@pytest.fixture
def run_yaml(tmp_path: Path) -> Path:
    """A run of two steps, each evaluated and saved, with an export at the end."""
    data = write_dataset(tmp_path / "data", vocab_size=300)
    train_tokenizer([["a text of a few words"]], 300).save(data / "tokenizer")
    sizes = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    run = {
        "model": {"config": {"model_type": "llama", "num_attention_heads": 2, **sizes}},
        "data": {"path": str(data)},
        "batch": {"sequence_length": 16, "global_batch_size": 2, "micro_batch_size": 2},
        "train": {"steps": 2},
        "optimizer": {"lr": 1e-3},
        "precision": {"dtype": "float32"},
        "evaluation": {"every_steps": 1},
        "checkpoint": {"every_steps": 1},
    }
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(run))
    return path


def train(package: Path, run_yaml: Path, output: Path) -> tuple[set[str], dict[str, str]]:
    """Train with the bigtrain in `package`, in a process of one rank. Return the modules that it
    loaded, and the checksums of the exported files."""
    names = output.with_suffix(".json")
    arguments = [str(names), "--config", str(run_yaml), f"output.directory={output}"]
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=package,
        env={**os.environ, "PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    exported = (output / "hf").iterdir()
    sums = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in exported}
    assert {"model.safetensors", "config.json"} < sums.keys()
    assert (output / "checkpoints/step-00000002/manifest.json").is_file()
    return set(json.loads(names.read_text())), sums


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_needs_no_sibling_and_few_modules(run_yaml: Path, tmp_path: Path) -> None:
    """A copy of the package without the siblings' files trains, evaluates, saves and exports what
    the whole package does."""
    copy = tmp_path / "core"
    for name in ("bigtrain", "ds_configs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for module, path in MODULES.items():
        if part_of(module) in SIBLINGS:
            (copy / path.relative_to(ROOT)).unlink()
    _, core_sums = train(copy, run_yaml, tmp_path / "of_core")

    # Trials of the model are made once, and then in the cache.
    options = ["--inputs", "--gpu", "H100", f"output.directory={tmp_path / 'run'}"]
    assert main(["check", "--config", str(run_yaml), *options]) == 0
    loaded, sums = train(ROOT, run_yaml, tmp_path / "run")
    assert core_sums == sums
    assert '"held_out_loss"' in (tmp_path / "run/metrics.jsonl").read_text()

    modules = {name for name in loaded if name in MODULES}
    assert {name: part_of(name) for name in modules if part_of(name) in SIBLINGS} == {}
    assert len(modules) <= MOST_MODULES, sorted(modules)
