"""Every line of the check of a GPU runs at tiny size on a CPU, and each part can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from benchmarks.gpu_check import experts, lives, machine, runner, speed
from benchmarks.gpu_check.changes import CHANGED
from benchmarks.gpu_check.page import BEGIN, END, PAGE, commit_of, write_page
from benchmarks.gpu_check.parts import PARTS
from benchmarks.gpu_check.results import Part, Setup, table
from benchmarks.support.points import SIZES
from tests.support.worlds import ROOT
from tests.unit.benchmarks.gpu_check_driver import FAULTS, Pretended

NAMES = [entry.name for entry in PARTS]
PRETENDED = ["machine", "flight-recorder", "activation-offload"]
# What needs CUDA is skipped here.
RUN = [name for name in NAMES if name != "speed-1b-liger"]
pytestmark = pytest.mark.timeout(900)  # parts run in the first test's set-up


def drive(directory: Path, words: list[str]) -> dict[str, Any]:
    """Results of parts in forks of one process, by name; ``PART!`` is one with its fault."""
    output = directory / "found.json"
    driver = ROOT / "tests" / "unit" / "benchmarks" / "gpu_check_driver.py"
    finished = subprocess.run(
        [sys.executable, str(driver), str(output), str(directory), *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    results_by_word: dict[str, Any] = json.loads(output.read_text())
    return results_by_word


@pytest.fixture(scope="module")
def results_by_part(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of parts as they are, with their faults, and where a GPU is pretended."""
    words = ["made-up", *RUN, *(f"{name}!" for name in RUN), *(f"{name}~" for name in PRETENDED)]
    directory = tmp_path_factory.mktemp("check")
    return drive(directory, words) | {"directory": directory}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_a_part_passes_on_a_cpu(name: str, results_by_part: dict[str, Any]) -> None:
    assert results_by_part[name]["status"] == "passed", results_by_part[name]
    assert results_by_part[name]["figures"]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_a_part_finds_the_fault_that_is_planted(name: str, results_by_part: dict[str, Any]) -> None:
    assert results_by_part[f"{name}!"]["status"] == "failed"
    assert (
        "Found" in results_by_part[f"{name}!"]["reason"]
    )  # of the part itself, not of the planting


@pytest.mark.slow
@pytest.mark.parametrize("name", PRETENDED)
def test_the_lines_for_a_gpu_run_where_one_is_pretended(
    name: str, results_by_part: dict[str, Any]
) -> None:
    result = results_by_part[f"{name}~"]
    # Of a process on a CPU the peak only grows.
    assert result["status"] == "passed" or "the peak is" in result["reason"], result


def test_a_gpu_is_filled_until_as_much_is_left_as_a_run_may_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, str]] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (50 << 30, 80 << 30))
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: asked.append((size, device)))
    monkeypatch.setattr(lives, "main", lambda words: len(words))
    monkeypatch.setattr(lives, "_repeatable", lambda: None)
    assert lives.run_program(["a", "b"], True, 3 << 30, None, "") == 2
    assert asked == [(47 << 30, "cuda")]


def test_a_machine_with_a_gpu_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(name="NVIDIA H200", total_memory=139 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    description = machine.describe()
    assert (description["gpu"], description["gpu_gib"], description["nccl"]) == (
        "NVIDIA H200",
        139.0,
        "2.28.9",
    )


def test_every_part_has_a_fault() -> None:
    assert FAULTS.keys() == set(NAMES)


def test_what_changed_comes_before_speed_and_the_rest_after_it() -> None:
    assert set(NAMES) > CHANGED.keys()
    assert NAMES[0] == "machine"
    assert set(NAMES[1 : 1 + len(CHANGED)]) == CHANGED.keys()
    speeds = [NAMES.index(name) for name in NAMES if name.startswith("speed-")]
    assert speeds[0] == 1 + len(CHANGED)
    unchanged = NAMES.index("parity-fp32")
    assert all(place < unchanged for place in speeds if not NAMES[place].startswith("speed-8b-"))


def test_a_subject_has_the_batch_of_the_recipe() -> None:
    batch = yaml.safe_load((ROOT / "bigtrain/recipes/llama3_1b.yaml").read_text())["batch"]
    point = speed.point_of("1b", "default", Setup("cuda", False, Path(), 1.0))
    per_step = point.micro_batch_size * point.accumulation * SIZES[point.size]["sequence_length"]
    assert per_step == batch["global_tokens"] / 8


@pytest.mark.parametrize("subject", speed.SUBJECTS)
def test_subjects_have_the_published_models(subject: str) -> None:
    point = speed.point_of(subject, "hf", Setup("cuda", False, Path(), 1.0))
    layers = (point.model_config or SIZES[point.size])["num_hidden_layers"]
    assert layers == {"1b": 16, "lora": 32, "moe": 48 / 8, "8b": 32}[subject]
    assert point.contenders == ("hf",)


def test_a_contender_that_cannot_run_here_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {}
    for is_installed in (True, False):
        monkeypatch.setattr(speed, "find_spec", lambda _, found=is_installed: found or None)
        part = Part("speed-1b-liger")
        speed.contend("1b", "liger", Setup("cpu", True, tmp_path, 10.0), part)
        said[is_installed] = (part.status, part.reason)
    assert said[True] == ("skipped", "needs CUDA")
    assert said[False] == ("skipped", "liger_kernel is not installed")


@pytest.mark.parametrize("contender", ["bare", "default"])
def test_only_a_peer_may_run_out_of_memory(
    contender: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(speed, "measure", measure)
    part = Part(f"speed-1b-{contender}")
    setup = Setup("cpu", True, tmp_path, 10.0)
    if contender == "bare":
        speed.contend("1b", contender, setup, part)
        assert (part.status, part.reason) == ("skipped", "out of memory")
    else:
        with pytest.raises(torch.OutOfMemoryError):
            speed.contend("1b", contender, setup, part)
    assert list(tmp_path.iterdir()) == []


def measured(name: str, **figures: Any) -> Part:
    _, subject, contender = name.split("-")
    values = {"tflops": None, "mfu": None, "peak_gib": 50.25, **figures}
    return Part(name, figures={"subject": subject, "contender": contender, **values})


def test_the_commit_of_a_copy_without_history_is_the_noted_one(tmp_path: Path) -> None:
    assert commit_of(tmp_path) is None
    (tmp_path / ".gpu-wheels").mkdir()
    (tmp_path / ".gpu-wheels" / "commit.txt").write_text("0123abc\n")
    assert commit_of(tmp_path) == "0123abc"


def test_tables_of_speed_are_written_into_a_copy_of_the_page(tmp_path: Path) -> None:
    copy = tmp_path / "benchmarks.md"
    copy.write_text(PAGE.read_text())
    machine = {"gpu": "NVIDIA H200", "date": "2026-11-30T10:00+00:00", "torch": "2.11.0"}
    parts = [Part("machine")]
    write_page(copy, machine, parts)  # nothing was measured yet
    assert copy.read_text() == PAGE.read_text()
    parts += [
        measured("speed-1b-default", tokens_per_s=52000.4, tflops=469.0, mfu=0.474),
        measured("speed-1b-bare", tokens_per_s=40000.0),
        Part("speed-1b-hf", status="skipped", reason="out of\nmemory"),
    ]
    write_page(copy, machine, parts)
    write_page(copy, machine, [*parts, measured("speed-moe-default", tokens_per_s=9000.0)])
    text = copy.read_text()
    for line in (
        "On one NVIDIA H200, 2026-11-30T10:00+00:00, commit not known, torch 2.11.0.",
        "| **bigtrain** | 52,000 | 469 | 47.4% | 50.2 GiB | 1.30 x |",
        "| bare PyTorch loop | 40,000 |  |  | 50.2 GiB | 1.00 x |",
        "| HF Trainer with the same DeepSpeed JSON | skipped: out of memory | | | | |",
        "python -m benchmarks.gpu_check --output checked --only machine speed-1b-default "
        "speed-1b-bare speed-1b-hf",
        "| **bigtrain** | 9,000 |  |  | 50.2 GiB |  |",
    ):
        assert text.count(line) == 1, line
    before, after = PAGE.read_text().split(BEGIN)[0], PAGE.read_text().split(END)[1]
    assert text.startswith(before)
    assert text.endswith(after)
    assert "| published: NeMo AutoModel" in text
    copy.write_text("a page")
    with pytest.raises(ValueError, match="has no"):
        write_page(copy, machine, parts)


@pytest.mark.parametrize(
    ("device", "tiny", "is_written"),
    [("cuda", False, True), ("cuda", True, False), ("cpu", False, False)],
)
def test_the_page_is_written_on_a_gpu_only(
    device: str, tiny: bool, is_written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runner, "run_all", lambda *_, page, **__: asked.append(page) or [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = ["--device", device, "--output", str(tmp_path), "--start", "fresh"]
    assert runner.main(words + ["--tiny"] * tiny) == 0
    assert asked == [PAGE if is_written else None]


@pytest.mark.slow
def test_figures_that_matter_are_there(results_by_part: dict[str, Any]) -> None:
    rest = results_by_part
    scaled = rest["parity-fp16"]["figures"]["zero0"]
    assert scaled["skipped_steps"] > 0
    assert scaled["last_scale"] < 2**21
    assert rest["trace"]["figures"]["top_ops"]
    row = rest["speed-8b-default"]["figures"]
    assert row["tokens_per_s"] > 0
    assert row["peak_gib"] > 0
    # 16 bytes a parameter of the tiny model, and little more.
    assert 1e-4 < row["planner_gib"] < 1
    ratio = row["planner_gib"] / row["peak_gib"]
    assert row["planner_gib_over_measured"] == pytest.approx(ratio)
    assert rest["checkpoints"]["figures"]["tensors_at_8"] > 0


@pytest.mark.slow
def test_grouped_products_are_measured_at_both_loads(results_by_part: dict[str, Any]) -> None:
    figures = results_by_part["grouped-products"]["figures"]
    for name in ("even, up", "even, down", "uneven, up", "uneven, down"):
        row = figures[name]
        assert {"forward_tflops", "to_inputs_tflops", "to_weights_tflops"} <= row.keys()
        ratio = row["forward_tflops"] / row["whole_tflops"]
        assert row["forward_over_whole"] == pytest.approx(ratio)
    assert figures["share_of_whole"] > 0


def test_a_share_of_the_peak_where_a_device_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _=0: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    part = Part("x")
    experts.grouped_products(Pretended("cpu", True, tmp_path, 10.0), part)
    assert part.status == "passed"
    assert part.figures["share_of_peak"] > 0
    up = part.figures["even, up"]
    assert up["forward_of_peak"] == pytest.approx(up["forward_tflops"] / 989.4, rel=1e-3)


def test_a_row_that_the_planner_has_a_figure_for() -> None:
    row = {"peak_gib": 8.0, "tokens_per_second": 100.0, "predicted_gib": 9.0}
    assert speed.beside(row) == {"planner_gib": 9.0, "planner_gib_over_measured": 1.125}
    rated = speed.beside({**row, "predicted_tokens_per_second": 120.0})
    assert rated["planner_tokens_per_s_over_measured"] == 1.2
    assert speed.beside({**row, "not_predicted": "why"}) == {"not_predicted": "why"}
    assert speed.beside({"peak_gib": 8.0, "tokens_per_second": 1.0}) == {}


@pytest.mark.slow
def test_what_a_cpu_cannot_call_is_named(results_by_part: dict[str, Any]) -> None:
    said = results_by_part["losses"]["figures"]["skipped"]
    assert said.keys() == {"liger-fp32", "liger-bf16", "liger-kernels"}
    said = {name: results_by_part[name]["figures"].get("skipped", {}) for name in RUN}
    assert said["zeropp"] == {"quantized": "needs CUDA"}
    assert "needs CUDA" in said["attention"]["sdpa-cudnn"]


@pytest.mark.slow
def test_a_part_that_fails_ends_no_other(results_by_part: dict[str, Any]) -> None:
    tree = json.loads((results_by_part["directory"] / "results.json").read_text())
    said = {part["part"]: (part["status"], part["reason"]) for part in tree["parts"]}
    assert said["works"] == ("passed", "")
    assert said["works-again"] == ("passed", "")
    assert said["sleeps"][0] == "failed"
    assert "took longer than its limit of 1 s" in said["sleeps"][1]
    assert said["is-killed"][0] == "failed"
    assert "ended with code -9" in said["is-killed"][1]
    assert said["raises"] == ("failed", "RuntimeError: planted")
    assert said["needs-much"][0] == "skipped"
    assert "s were left of 60" in said["needs-much"][1]
    written = (results_by_part["directory"] / "table.md").read_text()
    assert "| works | passed | 0 | seen 1.5 |" in written
    assert "RuntimeError: planted" in (results_by_part["directory"] / "logs.txt").read_text()


def test_a_table_is_one_line_a_part() -> None:
    part = Part("x", figures={"a": {"b": 1.23456}, "rows": [1], "names": ["p|q"]})
    part.fail("first\nline")
    part.fail("second")
    lines = table([part]).splitlines()
    assert lines[2:] == ["| x | failed: first line; second | 0 | a (b 1.235); names [p/q] |"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        runner.main([])
    assert ended.value.code == 2
    assert "no CUDA device here; --device cpu --tiny" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_runs_parts_in_fresh_processes(tmp_path: Path) -> None:
    words = ["--device", "cpu", "--tiny", "--start", "fresh", "--output", str(tmp_path)]
    finished = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", *words, "--only", "machine"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    tree = json.loads((tmp_path / "results.json").read_text())
    assert [part["status"] for part in tree["parts"]] == ["passed"]
    assert tree["machine"]["cores"] > 0
