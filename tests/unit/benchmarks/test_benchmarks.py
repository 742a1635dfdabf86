"""The benchmarks run and say what they measured; what that is, no test asserts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch

from benchmarks import expert_products
from benchmarks.support import litgpt_loop
from benchmarks.support.contenders import BareLoop
from benchmarks.support.points import Point, resolve_point
from bigtrain.cli import main as bigtrain
from bigtrain.data.loading.loader import open_training_data
from bigtrain.engine.deepspeed_patches.step import SPEED_PATCHES
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.parallel.grouped_experts import PADDED
from bigtrain.planner.tables.engines import cpu_engine, write_calibration
from bigtrain.planner.tables.hardware import find_device
from tests.launch.conftest import tokenize, write_documents
from tests.support.worlds import ROOT

SCRIPT = ROOT / "benchmarks" / "cpu_step.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(900)  # where DeepSpeed has to compile its FusedAdam for HF Trainer first
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_contender_is_compared(dtype: str, tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    finished = run(
        *("--size", "tiny", "--dtype", dtype, "--threads", "1", "--output", str(output)),
        *("--zero", "1", "--accumulation", "2"),
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    rows = [line.split() for line in finished.stdout.splitlines() if line.split()[:2] == ["1", "2"]]
    assert [row[2] for row in rows] == ["bare", "bigtrain", "hf"]
    assert all(float(row[4]) > 0 for row in rows)
    figures = json.loads(output.read_text())
    assert figures["machine"]["threads"] == 1
    (point,) = figures["points"]
    assert point["loss_difference"] is not None  # the step logged last did the same work
    assert point["contenders"]["bare"]["ratio"] == 1.0


@pytest.mark.slow
def test_an_output_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    finished = run("--output", str(tmp_path / "absent" / "figures.json"))
    assert finished.returncode == 2
    assert "absent/figures.json: no directory" in finished.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_checkpoints_are_compared_with_deepspeed_and_the_disk() -> None:
    script = ROOT / "benchmarks" / "checkpoint.py"
    finished = subprocess.run(
        [sys.executable, str(script), "--size", "tiny", "--rounds", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    figures = json.loads(finished.stdout[finished.stdout.index("{\n") :])
    assert 12 < figures["bytes_per_parameter"]["bigtrain"] < 14
    assert {"async stall", "async total", "sync total", "load"} <= figures["seconds"].keys()
    assert all(seconds > 0 for seconds in figures["seconds"].values())


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / name), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(900)  # HF Trainer may have to compile DeepSpeed's FusedAdam, and layers are
def test_the_gpu_benchmark_runs_its_whole_path(tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    finished = run_script(
        "gpu_step.py",
        *("--contenders", "bare", "bigtrain", "hf"),
        *("--smoke", "--loss", "plain", "chunked", "--checkpointing", "full"),
        *("--compile", "off", "--peer", "torchtitan=123", "--output", str(output)),
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    first, second = json.loads(output.read_text())["points"]
    assert list(first["contenders"]) == ["bare", "bigtrain", "hf", "torchtitan"]
    for point in (first, second):
        for name in ("bare", "bigtrain", "hf"):
            assert point["contenders"][name]["tokens_per_second"] > 0, finished.stdout
            assert point["contenders"][name]["peak_gib"] > 0
    assert "torchtitan" in finished.stdout
    assert "picture" in finished.stdout


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


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_gpu_benchmark_wants_a_gpu() -> None:
    finished = run_script("gpu_step.py")
    assert finished.returncode == 2
    assert "no CUDA device here; --smoke runs the same path on a CPU" in finished.stderr


@pytest.mark.slow
def test_start_up_is_compared_with_imports() -> None:
    finished = run_script("startup.py", "--rounds", "1")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    figures = json.loads(finished.stdout[finished.stdout.index("{\n") :])
    assert figures["run_over_imports"] > 0
    assert all(seconds > 0 for seconds in figures["seconds"].values())


@pytest.mark.slow
def test_the_loss_in_chunks_is_compared_with_full_logits() -> None:
    finished = run_script(
        "loss_memory.py",
        *("--tokens", "256", "--hidden-size", "32", "--chunk-tokens", "16", "--rounds", "1"),
        *("--vocabulary", "65536"),
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    figures = json.loads(finished.stdout[finished.stdout.index("{\n") :])
    assert 0 < figures["ratio"]["peak_gib"] < 1


@pytest.mark.slow
def test_documents_apart_are_compared_with_masks() -> None:
    finished = run_script(
        "document_attention.py",
        *("--tokens", "512", "--document-tokens", "64", "--hidden-size", "64", "--layers", "1"),
        *("--rounds", "1"),
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    figures = json.loads(finished.stdout[finished.stdout.index("{\n") :])
    assert all(value > 0 for value in figures["documents_of_masks"].values())


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_what_is_exchanged_is_what_the_formulas_say(tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    words = ("--size", "tiny", "--steps", "1", "--output", str(output))
    finished = run_script("parallel_overhead.py", *words)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    rows = {row["layout"]: row for row in json.loads(output.read_text())}
    assert rows.keys() == {"ZeRO 0", "ZeRO 1", "ZeRO 2", "ZeRO 3", "TP 2", "PP 2", "SP 2"}
    # Above: norms, counts of targets and padding.
    assert all(0.99 <= row["exchanged_ratio"] <= 1.05 for row in rows.values())
    assert all(row["step_seconds"] > 0 for row in rows.values())
    assert rows["PP 2"]["bubble"] == 0.2


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_divided_experts_send_what_the_planner_says(tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    words = ("--size", "tiny", "--steps", "1", "--rounds", "1", "--output", str(output))
    finished = run_script("experts.py", *words)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    rows = {row["layout"]: row for row in json.loads(output.read_text())}
    assert rows.keys() == {"ZeRO 1", "EP 2", "TP 2"}
    assert all(row["step_seconds"] > 0 for row in rows.values())
    # The router does not choose evenly, and sends as many to the other rank as it likes.
    assert 0.8 <= rows["EP 2"]["sent_of_formula"] <= 1.2
    assert rows["ZeRO 1"]["sent_bytes"] is rows["TP 2"]["sent_bytes"] is None


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    texts, tokenizer = tmp_path / "texts.jsonl", tmp_path / "tokenizer"
    write_documents(texts, 80)
    words = ["tokenizer", "--input", texts, "--vocab-size", "320", "--output", tokenizer]
    assert bigtrain(list(map(str, words))) == 0
    return tokenize(texts, tokenizer, tmp_path / "shards")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_optimizers_are_compared_in_cost_and_loss(shards: Path, tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    finished = run_script(
        "optimizers.py",
        *("--hidden-sizes", "64", "--rounds", "1", "--data", str(shards)),
        *("--steps", "4", "--length", "16", "--samples", "2", "--rates", "3e-3", "6e-3"),
        *("--more", "1", "--vocabulary", "320", "--output", str(output)),
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
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
    assert "muon's best is " in finished.stdout


def test_every_way_to_compute_experts_is_measured_and_the_same() -> None:
    shapes = expert_products.SHAPES["tiny"]
    aligned, odd = (
        next(expert_products.measure_all([shape], torch.device("cpu"), 1)) for shape in shapes
    )
    assert aligned["seconds"].keys() == {"grouped_mm", PADDED, "batched_mm", "eager"}
    assert odd["seconds"].keys() == {PADDED, "batched_mm", "eager"}
    assert all(seconds > 0 for row in (aligned, odd) for seconds in row["seconds"].values())


@pytest.mark.slow
def test_a_report_is_compared_with_parsing() -> None:
    finished = run_script("report.py", "--steps", "200", "--rounds", "1")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    figures = json.loads(finished.stdout[finished.stdout.index("{\n") :])
    assert figures["steps"] == 200
    assert all(value > 0 for value in figures.values())


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--deepspeed-hooks",)], ids=["ours", "DeepSpeed's"])
def test_the_engine_s_host_time_is_measured(words: tuple[str, ...], tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    small = ("--zero", "3", "--world-size", "1", "--layers", "2", "--steps", "1")
    finished = run_script("host_time.py", *small, *words, "--output", str(output))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    (row,) = json.loads(output.read_text())
    assert row["num_parameters"] == 2 * 9 + 2
    assert min(row["bare_ms"], row["engine_ms"]) > 0


@pytest.mark.slow
def test_both_codes_of_zero_1_are_measured_by_turns(tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    words = ("--zero", "1", "--world-size", "1", "--layers", "2", "--steps", "2")
    finished = run_script("host_time.py", *words, "--versus", "1", "--output", str(output))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    theirs, ours = json.loads(output.read_text())
    assert theirs["without"]
    assert not ours["without"]
    assert theirs["loss"] == ours["loss"]
    assert min(theirs["floor_ms"], ours["floor_ms"]) > 0
    assert "ratio" in finished.stdout


@pytest.mark.slow
def test_each_speed_patch_of_zero_0_is_turned_off(tmp_path: Path) -> None:
    words = ("--zero", "0", "--world-size", "1", "--layers", "1", "--steps", "1", "--each", "1")
    finished = run_script("host_time.py", *words)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    lines = [line for line in finished.stdout.splitlines() if "ms per million" in line]
    names = [patch.name for patch in SPEED_PATCHES if 0 in patch.stages]
    assert len(lines) == len(names) > 0
    assert all(name in line for name, line in zip(names, lines, strict=True))


@pytest.mark.slow
def test_predicted_memory_is_held_against_real_allocations() -> None:
    """One layout of each kind, and what they are off by: within the bounds that the docs tell."""
    for only in ("llama zero3 offload optimizer", "qwen3_moe zero1 ep2 bf16"):
        script = [sys.executable, str(ROOT / "benchmarks" / "planner_memory.py"), "--only", only]
        finished = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=False)
        assert finished.returncode == 0, finished.stdout + finished.stderr
        line, summary = finished.stdout.splitlines()[-2:]
        assert line.startswith(only)
        assert "predicted" in line
        match = re.fullmatch(r"1 layouts: mean error ([0-9.]+)%, worst [0-9.]+%", summary)
        assert match is not None, summary
        assert float(match[1]) < 10


@pytest.mark.slow
def test_layouts_ranked_first_are_measured(tmp_path: Path) -> None:
    hardware = tmp_path / "cpu.json"
    write_calibration(find_device("CPU"), cpu_engine(), hardware)
    script = [sys.executable, str(ROOT / "benchmarks" / "planner_ranking.py"), "--only", "llama"]
    script += ["--world-sizes", "2", "--first", "2", "--hardware", str(hardware)]
    finished = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "llama, 2 processes: of 2 layouts, the one ranked first is number" in finished.stdout
    assert re.search(r"measured ranks of the layouts ranked first: [12]$", finished.stdout.strip())


@pytest.mark.slow
def test_the_loss_of_local_steps_is_compared(shards: Path, tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    finished = run_script(
        "sites.py",
        *("--inner-steps", "1", "4", "--sites", "2", "--codecs", "float32", "int4", "--steps", "6"),
        *("--length", "16", "--samples", "4", "--held-out", "4", "--hidden-size", "32"),
        *("--vocabulary", "320", "--data", str(shards), "--output", str(output)),
        *("--seeds", "1", "2"),
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    figures = json.loads(output.read_text())
    losses = [loss for of_seed in figures["sites"].values() for loss in of_seed.values()]
    assert len({*losses, *figures["synchronous"].values()}) == 2 * 5
    both = [figures["sites"][seed]["2 4 int4"] for seed in ("1", "2")]
    assert f"| 2 | 4 | int4 | {sum(both) / 2:.4f} +- " in finished.stdout
    assert "| 2 | 4 | " in finished.stdout
