"""The benchmarks run and say what they measured; what that is, no test asserts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import expert_products
from benchmarks.support import litgpt_loop
from benchmarks.support.contenders import BareLoop
from benchmarks.support.points import Point, resolve_point
from bigtrain.cli import main as bigtrain
from bigtrain.data.loading.loader import open_training_data
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.parallel.grouped_experts import PADDED
from bigtrain.planner.tables.engines import cpu_engine, write_calibration
from bigtrain.planner.tables.hardware import find_device
from tests.launch.conftest import tokenize, write_documents
from tests.support.worlds import ROOT


def run(script: str, *words: object, code: int = 0) -> str:
    """Return what a benchmark prints."""
    finished = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *map(str, words)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == code, finished.stdout + finished.stderr
    return finished.stdout + finished.stderr * (code != 0)


def figures_in(printed: str) -> dict[str, Any]:
    figures: dict[str, Any] = json.JSONDecoder().raw_decode(printed[printed.index("{\n") :])[0]
    return figures


LOSS = "--tokens 256 --hidden-size 32 --chunk-tokens 16 --rounds 1 --vocabulary 65536"
DOCUMENTS = "--tokens 512 --document-tokens 64 --hidden-size 64 --layers 1 --rounds 1"
PRINTED: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "checkpoint.py": (
        "--size tiny --rounds 1",
        lambda told: (
            12 < told["bytes_per_parameter"]["bigtrain"] < 14
            and {"async stall", "async total", "sync total", "load"} <= told["seconds"].keys()
            and min(told["seconds"].values()) > 0
        ),
    ),
    "startup.py": (
        "--rounds 1",
        lambda told: min(told["run_over_imports"], *told["seconds"].values()) > 0,
    ),
    "loss_memory.py": (LOSS, lambda told: 0 < told["ratio"]["peak_gib"] < 1),
    "document_attention.py": (DOCUMENTS, lambda told: min(told["documents_of_masks"].values()) > 0),
    "report.py": (
        "--steps 200 --rounds 1",
        lambda told: told["steps"] == 200 and min(told.values()) > 0,
    ),
    "chat_and_packing.py": (
        "--tiny",
        lambda told: (
            told["chat"].keys() == {"marked", "unmarked"}
            and all(row["times_faster"] > 0 for row in told["chat"].values())
            and told["packing"].keys() == {"2048", "4096", "32768"}
        ),
    ),
}
"""Scripts, their words, and what holds of the figures that they print."""


@pytest.mark.slow
@pytest.mark.parametrize("script", PRINTED)
def test_a_script_prints_its_figures(script: str) -> None:
    words, holds = PRINTED[script]
    told = figures_in(run(script, *words.split()))
    assert holds(told), told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "words", "parts"),
    [
        ("remote_input.py", "--megabytes 2 --rounds 1 --vocab-size 300 --workers 1",
         ["each line broken twice: same bytes", "ratio s3 / disk"]),
        ("tokenizing.py", "--megabytes 0.1 --vocab-size 300 --rounds 1",
         ["ratio command after start-up / its encoder only", "reference encoder only",
          "peak memory of"]),
        ("loader.py", "--tiny --directory {place}", ["2e+09 tokens in 2e+06 documents, sparse"]),
    ],
)  # fmt: skip
def test_a_script_names_its_rows(script: str, words: str, parts: list[str], tmp_path: Path) -> None:
    printed = run(script, *words.format(place=tmp_path).split())
    for part in parts:
        assert part in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(900)  # where DeepSpeed has to compile its FusedAdam for HF Trainer first
def test_every_contender_is_compared(tmp_path: Path) -> None:
    absent = tmp_path / "absent" / "figures.json"
    assert "absent/figures.json: no directory" in run("cpu_step.py", "--output", absent, code=2)
    output = tmp_path / "figures.json"
    words = "--size tiny --dtype bf16 --threads 1 --zero 1 --accumulation 2 --output"
    printed = run("cpu_step.py", *words.split(), output)
    rows = [line.split() for line in printed.splitlines() if line.split()[:2] == ["1", "2"]]
    assert [row[2] for row in rows] == ["bare", "bigtrain", "hf"]
    assert all(float(row[4]) > 0 for row in rows)
    figures = json.loads(output.read_text())
    assert figures["machine"]["threads"] == 1
    (point,) = figures["points"]
    assert point["loss_difference"] is not None  # the step logged last did the same work
    assert point["contenders"]["bare"]["ratio"] == 1.0


@pytest.mark.slow
@pytest.mark.timeout(900)  # layers are compiled
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_gpu_benchmark_runs_its_whole_path(tmp_path: Path) -> None:
    said = run("gpu_step.py", code=2)
    assert "no CUDA device here; --smoke runs the same path on a CPU" in said
    output = tmp_path / "figures.json"
    words = "--contenders bare bigtrain --smoke --loss chunked --checkpointing full --compile off"
    printed = run("gpu_step.py", *words.split(), "--peer", "torchtitan=123", "--output", output)
    (point,) = json.loads(output.read_text())["points"]
    assert list(point["contenders"]) == ["bare", "bigtrain", "torchtitan"]
    for name in ("bare", "bigtrain"):
        assert point["contenders"][name]["tokens_per_second"] > 0, printed
        assert point["contenders"][name]["peak_gib"] > 0
    assert "torchtitan" in printed
    assert "picture" in printed


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_what_is_exchanged_is_what_the_formulas_say(tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    run("parallel_overhead.py", *"--size tiny --steps 1 --output".split(), output)
    rows = {row["layout"]: row for row in json.loads(output.read_text())}
    assert rows.keys() == {"ZeRO 0", "ZeRO 1", "ZeRO 2", "ZeRO 3", "TP 2", "PP 2", "SP 2"}
    # Above: norms, counts of targets and padding.
    assert all(0.99 <= row["exchanged_ratio"] <= 1.05 for row in rows.values())
    assert all(row["step_seconds"] > 0 for row in rows.values())
    assert rows["PP 2"]["bubble"] == 0.2
    run("experts.py", *"--size tiny --steps 1 --rounds 1 --output".split(), output)
    rows = {row["layout"]: row for row in json.loads(output.read_text())}
    assert rows.keys() == {"ZeRO 1", "EP 2", "TP 2"}
    assert all(row["step_seconds"] > 0 for row in rows.values())
    # The router does not choose evenly, and sends as many to the other rank as it likes.
    assert 0.8 <= rows["EP 2"]["sent_of_formula"] <= 1.2
    assert rows["ZeRO 1"]["sent_bytes"] is rows["TP 2"]["sent_bytes"] is None


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_optimizers_are_compared_in_cost_and_loss(shards: Path, tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    words = "--hidden-sizes 64 --rounds 1 --steps 4 --length 16 --samples 2 --rates 3e-3 6e-3"
    words += " --more 1 --vocabulary 320"
    printed = run("optimizers.py", *words.split(), "--data", shards, "--output", output)
    figures = json.loads(output.read_text())
    rows = figures["cost"]["64"]
    assert rows.keys() == {
        *("adamw", "adamw, bfloat16 states", "adamw, 8-bit", "muon", "lion"),
        *("adafactor", "DeepSpeed's muon"),
    }
    timed = ("seconds", "cpu_seconds", "bytes", "step_bytes")
    assert all(row[name] > 0 for row in rows.values() for name in timed)
    assert rows["adamw, bfloat16 states"]["bytes"] < 0.51 * rows["adamw"]["bytes"]
    # All but AdamW's share of embeddings, head and norms.
    assert rows["muon"]["bytes"] == pytest.approx(rows["DeepSpeed's muon"]["bytes"], rel=0.01)
    assert rows["muon"]["sent_bytes"] > 0 == rows["lion"]["sent_bytes"]
    # Two rates, and one beyond the better one.
    assert [len(losses) for losses in figures["loss"].values()] == [3, 3]
    assert "muon's best is " in printed


@pytest.mark.slow
def test_both_codes_of_zero_1_are_measured_by_turns(tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    words = "--zero 1 --world-size 1 --layers 2 --steps 2 --versus 1 --output"
    printed = run("host_time.py", *words.split(), output)
    theirs, ours = json.loads(output.read_text())
    assert theirs["without"]
    assert not ours["without"]
    assert theirs["loss"] == ours["loss"]
    assert min(theirs["floor_ms"], ours["floor_ms"]) > 0
    assert "ratio" in printed
    words = "--zero 3 --world-size 1 --layers 2 --steps 1 --deepspeed-hooks --output"
    run("host_time.py", *words.split(), output)
    (row,) = json.loads(output.read_text())
    assert row["num_parameters"] == 2 * 9 + 2
    assert min(row["bare_ms"], row["engine_ms"]) > 0


@pytest.mark.slow
def test_what_the_planner_predicts_is_measured(tmp_path: Path) -> None:
    """A layout, and what it is off by: within the bounds that the docs tell."""
    only = "qwen3_moe zero1 ep2 bf16"
    line, summary = run("planner_memory.py", "--only", only).splitlines()[-2:]
    assert line.startswith(only)
    assert "predicted" in line
    match = re.fullmatch(r"1 layouts: mean error ([0-9.]+)%, worst [0-9.]+%", summary)
    assert match is not None, summary
    assert float(match[1]) < 10
    hardware = tmp_path / "cpu.json"
    write_calibration(find_device("CPU"), cpu_engine(), hardware)
    words = "--only llama --world-sizes 2 --first 2 --hardware"
    printed = run("planner_ranking.py", *words.split(), hardware)
    assert "llama, 2 processes: of 2 layouts, the one ranked first is number" in printed
    assert re.search(r"measured ranks of the layouts ranked first: [12]$", printed.strip())


@pytest.mark.slow
def test_the_loss_of_local_steps_is_compared(shards: Path, tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    words = "--inner-steps 1 4 --sites 2 --codecs float32 int4 --steps 6 --length 16 --samples 4"
    words += " --held-out 4 --hidden-size 32 --vocabulary 320 --seeds 1 2"
    printed = run("sites.py", *words.split(), "--data", shards, "--output", output)
    figures = json.loads(output.read_text())
    losses = [loss for of_seed in figures["sites"].values() for loss in of_seed.values()]
    assert len({*losses, *figures["synchronous"].values()}) == 2 * 5
    both = [figures["sites"][seed]["2 4 int4"] for seed in ("1", "2")]
    assert f"| 2 | 4 | int4 | {sum(both) / 2:.4f} +- " in printed


@pytest.mark.skipif(not litgpt_loop.is_installed(), reason="litgpt is not installed")
@pytest.mark.filterwarnings("ignore")  # of Lightning, about its surroundings
def test_litgpt_trains_the_same_model(tmp_path: Path) -> None:
    """From the same weights on the same batches; it decays all parameters, bigtrain not all."""
    run = resolve_point(
        Point("tiny", 0, 2, 2, "fp32", 1, 3, 1, (), loss="plain"), tmp_path / "data"
    )
    hf_config = load_hf_config(run.config.model)
    with closing(open_training_data(run.config, run.plan, 0)) as batches:
        steps = [batches.step(n * run.plan.global_batch_size) for n in range(3)]
    loops = (
        BareLoop(run, hf_config, steps, torch.device("cpu")),
        litgpt_loop.LitgptLoop(run, hf_config, steps),
    )
    for loop in loops:
        loop.run(3)
    bare, litgpt = (torch.stack(loop.losses).tolist() for loop in loops)
    assert litgpt == pytest.approx(bare, abs=1e-5)
    assert bare[2] != pytest.approx(bare[0], abs=1e-4)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    texts, tokenizer = tmp_path / "texts.jsonl", tmp_path / "tokenizer"
    write_documents(texts, 80)
    words = ["tokenizer", "--input", texts, "--vocab-size", "320", "--output", tokenizer]
    assert bigtrain(list(map(str, words))) == 0
    return tokenize(texts, tokenizer, tmp_path / "shards")


def test_every_way_to_compute_experts_is_measured_and_the_same() -> None:
    shapes = expert_products.SHAPES["tiny"]
    aligned, odd = (
        next(expert_products.measure_all([shape], torch.device("cpu"), 1)) for shape in shapes
    )
    assert aligned["seconds"].keys() == {"grouped_mm", PADDED, "batched_mm", "eager"}
    assert odd["seconds"].keys() == {PADDED, "batched_mm", "eager"}
    assert all(seconds > 0 for row in (aligned, odd) for seconds in row["seconds"].values())
