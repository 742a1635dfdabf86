"""metrics.jsonl, log.txt, what stands on standard error, and real trackers."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tensorboard.summary.writer import event_file_writer
from tensorboard.summary.writer.event_file_writer import AtomicCounter

from bigtrain.errors import LaunchError
from bigtrain.metrics.step_metrics import Breakdown, StepMetrics, is_optional
from bigtrain.run.reporting import trackers as trackers_module
from bigtrain.run.reporting.metrics import HeldOutLoss, MetricsWriter, check_trackers
from bigtrain.run.reporting.progress import format_duration, format_lr, format_rate
from bigtrain.run.reporting.trackers import flatten
from tests.support.run_directories import NUMBERS

FIELDS = [row.name for row in fields(StepMetrics) if not is_optional(row)]


def step_metrics(step: int, loss: float = 6.0, utilization: float | None = None) -> StepMetrics:
    known = {
        "step": step,
        "loss": loss,
        "lr": 1e-3,
        "grad_norm": 1.25,
        "tokens": step * 4096,
        "samples": step * 16,
        "tokens_per_second": 5300.4,
        "step_seconds": 0.5,
        "model_flops_utilization": utilization,
        "memory_gib": 1.5,
    }
    return StepMetrics(**(NUMBERS | known))


def writer(directory: Path, **changes: Any) -> MetricsWriter:
    settings: dict[str, Any] = {
        "total_steps": 400,
        "trackers": (),
        "project": "tests",
        "run_config": {"optimizer": {"lr": 1e-3}},
        "terminal": False,
    }
    return MetricsWriter(directory, **(settings | changes))


def lines_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_each_step_is_one_line_with_the_fields_of_the_design(tmp_path: Path) -> None:
    with writer(tmp_path) as metrics:
        metrics.log_step(step_metrics(10, loss=6.125))
        # Read while the writer is open: a line is there as soon as it is logged.
        (line,) = lines_of(tmp_path)
    assert list(line) == FIELDS
    assert line["step"] == 10
    assert line["loss"] == 6.125
    assert line["tokens"] == 40960
    assert line["model_flops_utilization"] is None


def test_the_breakdown_of_a_step_is_written_and_summed_up(tmp_path: Path) -> None:
    first = Breakdown(0.0, 0.1, 0.2, None, 0.05, 0.02, 0.15)
    second = Breakdown(0.4, 0.1, 0.2, None, 0.05, 0.02, 0.15)
    with writer(tmp_path, trackers=("tensorboard",)) as metrics:
        peaks = {"forward": 1.5, "save": 2.0}
        imbalance = {"model.layers.0.mlp.experts": 1.25}
        exchange = {"sent_bytes": 4096.0, "seconds": 0.5}
        objects = {"breakdown": first, "peak_memory_gib_by_phase": peaks}
        experts = {"expert_imbalance": imbalance, "expert_exchange": exchange}
        matrices = {"optimizer_exchange": {"sent_bytes": 512.0}}
        metrics.log_step(replace(step_metrics(1), **objects, **experts, **matrices))
        metrics.log_step(replace(step_metrics(4), breakdown=second))
        metrics.log_step(step_metrics(5))
        summary = metrics.summary()
    lines = lines_of(tmp_path)
    assert [list(line)[len(FIELDS) :] for line in lines] == [
        [
            *("breakdown", "peak_memory_gib_by_phase", "expert_imbalance", "expert_exchange"),
            "optimizer_exchange",
        ],
        ["breakdown"],
        [],
    ]
    assert lines[0]["breakdown"] == asdict(first)
    assert lines[0]["breakdown"]["compute_seconds"] is None
    assert lines[0]["peak_memory_gib_by_phase"] == peaks
    assert lines[0]["expert_imbalance"] == imbalance
    assert lines[0]["expert_exchange"] == exchange
    assert (
        "step      data 300, forward 100, backward 200, optimizer 50, engine 150 ms, "
        "of them 20 ms waiting for other ranks"
    ) in summary
    scalars = read_scalars(tmp_path)
    assert scalars["breakdown/data_seconds"] == [(1, 0.0), (4, pytest.approx(0.4))]
    assert scalars["peak_memory_gib/save"] == [(1, 2.0)]
    assert scalars["expert_imbalance/model.layers.0.mlp.experts"] == [(1, 1.25)]
    assert scalars["expert_exchange/sent_bytes"] == [(1, 4096.0)]
    assert scalars["optimizer_exchange/sent_bytes"] == [(1, 512.0)]
    assert "breakdown/compute_seconds" not in scalars


def test_held_out_losses_of_a_mixture(tmp_path: Path) -> None:
    sources = {"books": HeldOutLoss(1.0, 300), "code": HeldOutLoss(1e4, 200)}
    with writer(tmp_path, trackers=("tensorboard",)) as metrics:
        metrics.log_evaluation(20, HeldOutLoss(2.0, 500), sources)
    (line,) = lines_of(tmp_path)
    assert {name: value for name, value in line.items() if name != "held_out_sources"} == {
        "step": 20,
        "held_out_loss": 2.0,
        "held_out_perplexity": pytest.approx(math.exp(2.0)),
        "held_out_tokens": 500,
    }
    assert line["held_out_sources"] == {
        "books": {"loss": 1.0, "perplexity": pytest.approx(math.e), "tokens": 300},
        "code": {"loss": 1e4, "perplexity": None, "tokens": 200},
    }
    log = (tmp_path / "log.txt").read_text()
    assert "held-out loss 2.0000 perplexity 7.39 (books 1.0000, code 10000.0000)\n" in log
    scalars = read_scalars(tmp_path)
    assert scalars["held_out_loss"] == [(20, 2.0)]
    assert scalars["held_out_loss/books"] == [(20, 1.0)]
    assert scalars["held_out_loss/code"] == [(20, 1e4)]


SAMPLES = [("Ada", " proved *a*\ntheorem"), ("Łódź", "")]


def test_samples_are_texts_of_tensorboard(tmp_path: Path) -> None:
    with writer(tmp_path, trackers=("tensorboard",)) as metrics:
        metrics.log_samples(10, SAMPLES)
        metrics.log_samples(20, SAMPLES[:1])
    events = read_events(tmp_path)
    texts_by_tag = {tag: events.Tensors(tag) for tag in events.Tags()["tensors"]}
    assert {tag: [one.step for one in values] for tag, values in texts_by_tag.items()} == {
        "samples/0/text_summary": [10, 20],
        "samples/1/text_summary": [10],
    }
    (shown,) = texts_by_tag["samples/0/text_summary"][0].tensor_proto.string_val
    assert shown.decode() == ("prompt:\n\n    Ada\n\ncontinuation:\n\n     proved *a*\n    theorem")


@pytest.mark.filterwarnings("ignore")
def test_samples_are_a_table_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the file that `wandb sync` sends: the library itself, offline."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with writer(tmp_path, trackers=("wandb",)) as metrics:
        metrics.log_samples(10, SAMPLES)
    (table,) = (tmp_path / "wandb").rglob("*.table.json")
    tree = json.loads(table.read_text())
    assert tree["columns"] == ["step", "prompt", "text"]
    assert tree["data"] == [[10, prompt, text] for prompt, text in SAMPLES]


@pytest.mark.filterwarnings("ignore")
def test_samples_are_files_of_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    with writer(tmp_path, trackers=("mlflow",)) as metrics:
        metrics.log_step(step_metrics(10))
        metrics.log_samples(10, SAMPLES)
    (file,) = (tmp_path / "mlruns").rglob("step-00000010.jsonl")
    assert file.parent.name == "samples"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows == [{"prompt": prompt, "text": text} for prompt, text in SAMPLES]


def test_samples_of_steps_that_are_trained_again_are_dropped(tmp_path: Path) -> None:
    with writer(tmp_path) as metrics:
        for step in (10, 20):
            metrics.log_samples(step, [("Ada", " proved"), ("Łódź", f"\n{step}")])
        metrics.roll_back(10, 100)
        metrics.log_samples(15, [("Ada", " wrote")])
    path = tmp_path / "samples.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == [10, 10, 15]
    assert lines[1] == {"step": 10, "prompt": "Łódź", "text": "\n10"}
    with writer(tmp_path, resume_step=12):
        pass
    assert len(path.read_text(encoding="utf-8").splitlines()) == 2


def test_figures_that_are_not_finite_are_null_in_valid_json(tmp_path: Path) -> None:
    with writer(tmp_path) as metrics:
        metrics.log_step(step_metrics(1, loss=math.nan))
        metrics.log_evaluation(1, HeldOutLoss(1e4, 8))
        metrics.close(metrics.summary())
    step, held_out = lines_of(tmp_path)
    assert step["loss"] is None
    assert held_out["held_out_loss"] == 1e4
    assert held_out["held_out_perplexity"] is None


def test_plain_lines_go_to_standard_error_and_to_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with writer(tmp_path) as metrics:
        metrics.info("zero1 on 2 processes")
        metrics.log_step(step_metrics(10, loss=6.1234))
    expected = [
        "zero1 on 2 processes",
        "step 10/400 loss 6.123 lr 1.00e-3 grad_norm 1.25 tokens/s 5,300 left 3m15s",
    ]
    metrics.info("a late line")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [*expected, "a late line"]
    log = [line.partition(" ") for line in (tmp_path / "log.txt").read_text().splitlines()]
    assert [text for _, _, text in log] == expected
    for stamp, _, _ in log:
        assert datetime.fromisoformat(stamp).tzinfo is not None


def test_a_terminal_gets_a_bar_and_the_log_the_same_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with writer(tmp_path, terminal=True) as metrics:
        metrics.log_step(step_metrics(100))
        metrics.info("a word between")
    shown = capsys.readouterr().err
    assert "100/400" in shown
    assert "loss 6 lr 1.00e-3 grad_norm 1.25 tokens/s 5,300 left 2m30s" in shown
    assert "a word between" in shown
    log = (tmp_path / "log.txt").read_text().splitlines()
    assert " step 100/400 loss 6 " in log[0]
    assert log[1].endswith(" a word between")


def test_a_resumed_run_holds_each_step_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with writer(tmp_path) as metrics:
        for step in (10, 20, 30):
            metrics.log_step(step_metrics(step))
            metrics.log_evaluation(step, HeldOutLoss(5.0, 8))
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 40, "lo')  # a kill in the middle of a line

    with writer(tmp_path, resume_step=20) as metrics:
        metrics.log_step(step_metrics(30, loss=4.0))
    steps = [(line["step"], "held_out_loss" in line) for line in lines_of(tmp_path)]
    assert steps == [(10, False), (10, True), (20, False), (20, True), (30, False)]
    assert lines_of(tmp_path)[-1]["loss"] == 4.0
    assert "dropped 2 lines of steps after 20" in capsys.readouterr().err
    assert sorted(file.name for file in tmp_path.iterdir()) == ["log.txt", "metrics.jsonl"]


def test_a_run_from_the_beginning_keeps_no_older_lines(tmp_path: Path) -> None:
    with writer(tmp_path) as metrics:
        metrics.log_evaluation(0, HeldOutLoss(9.0, 8))
        metrics.log_step(step_metrics(10))
    with writer(tmp_path) as metrics:
        metrics.log_step(step_metrics(10, loss=1.0))
    (line,) = lines_of(tmp_path)
    assert line["loss"] == 1.0


def test_summary_is_what_the_run_came_to(tmp_path: Path) -> None:
    with writer(tmp_path) as metrics:
        metrics.log_step(step_metrics(10, loss=6.0))
        metrics.log_evaluation(20, HeldOutLoss(2.0, 512))
        metrics.log_step(step_metrics(400, loss=2.5, utilization=0.412))
        metrics.close([*metrics.summary(), "exported  runs/x/hf"])
        metrics.close(["never shown"])
    log = (tmp_path / "log.txt").read_text()
    assert " steps     400/400, 1,638,400 tokens, 6,400 samples\n" in log
    assert ", 5,300 tokens/s, 41.2% of peak FLOP/s\n" in log
    assert "loss      6.0000 -> 2.5000\n" in log
    assert "held out  loss 2.0000 perplexity 7.39 at step 20\n" in log
    assert "memory    1.50 GiB at most on the main rank\n" in log
    assert log.endswith("exported  runs/x/hf\n")


def test_summary_of_a_resumed_run_begins_with_the_first_loss_of_all(tmp_path: Path) -> None:
    with writer(tmp_path) as metrics:
        metrics.log_step(step_metrics(10, loss=6.0))
    with writer(tmp_path, resume_step=10) as metrics:
        assert metrics.summary() == ["no step after 10 of 400 was logged"]
        metrics.log_step(step_metrics(20, loss=3.0))
        lines = metrics.summary()
    assert "loss      6.0000 -> 3.0000" in lines
    assert " since step 10, " in lines[1]


def read_events(directory: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    return events


def read_scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    events = read_events(directory)
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_tensorboard_gets_the_same_figures(tmp_path: Path) -> None:
    with writer(tmp_path, trackers=("tensorboard",)) as metrics:
        metrics.log_step(step_metrics(10, loss=6.0))
        metrics.log_step(step_metrics(20, loss=5.0))
        metrics.log_evaluation(20, HeldOutLoss(2.0, 512))
    scalars = read_scalars(tmp_path)
    assert scalars["loss"] == [(10, 6.0), (20, 5.0)]
    assert scalars["held_out_loss"] == [(20, 2.0)]
    known = set(FIELDS) - {"step", "model_flops_utilization"}
    assert set(scalars) >= known
    assert "model_flops_utilization" not in scalars
    (settings,) = (tmp_path / "tensorboard").rglob("hparams.yml")
    assert "optimizer.lr: 0.001" in settings.read_text()


def test_tensorboard_of_a_resumed_run_forgets_the_steps_that_are_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Files are read in the order of their names, which end with how many this process has written:
    # of the tenth and the eleventh, the other way round.
    monkeypatch.setattr(event_file_writer, "_global_uid", AtomicCounter(0))
    for first, resume_step in ((10, 0), (20, 10)):
        with writer(tmp_path, trackers=("tensorboard",), resume_step=resume_step) as metrics:
            metrics.log_step(step_metrics(first, loss=float(first)))
            metrics.log_step(step_metrics(first + 20, loss=float(resume_step)))
    assert read_scalars(tmp_path)["loss"] == [(10, 10.0), (20, 20.0), (40, 10.0)]


def test_trackers_need_no_process_group_and_leave_accelerate_alone(tmp_path: Path) -> None:
    """As on rank 0 of many: asking accelerate's PartialState would wait for the other ranks."""
    code = """
import os, sys
from pathlib import Path
from bigtrain.metrics.step_metrics import Breakdown
from bigtrain.run.reporting.metrics import HeldOutLoss, MetricsWriter
before = dict(os.environ)
with MetricsWriter(Path(sys.argv[1]), total_steps=1, trackers=["tensorboard"], project="p",
                   run_config={}, terminal=False) as metrics:
    metrics.log_evaluation(1, HeldOutLoss(1.0, 1))
from accelerate.state import PartialState
import torch
assert PartialState._shared_state == {}
assert not torch.distributed.is_initialized()
assert dict(os.environ) == before
"""
    world = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    environment = os.environ | world | {"MASTER_PORT": "1"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=environment)
    assert read_scalars(tmp_path)["held_out_loss"] == [(1, 1.0)]


def test_missing_tracker_packages_are_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["absent_tracker", "tensorboard", "leftover"]
    packages = {"absent_tracker": ("absent_tracker", "absent-tracker"), "leftover": ("wandb0", "w")}
    monkeypatch.setattr(
        trackers_module, "_PACKAGES", packages | {"tensorboard": ("tensorboard", "tensorboard")}
    )
    # A folder of the package's name is not the package.
    (tmp_path / "wandb0").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    absent, leftover = check_trackers(names)
    assert str(absent) == (
        "logging.trackers = 'absent_tracker': needs the package absent-tracker, which is not "
        "installed -> pip install absent-tracker, or remove absent_tracker from the list"
    )
    assert leftover.value == "leftover"


def test_every_tracker_of_the_configuration_is_known() -> None:
    from typing import get_args

    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    from bigtrain.settings.run_config import LoggingSection

    (choices, _) = get_args(LoggingSection.model_fields["trackers"].annotation)
    assert set(get_args(choices)) == set(trackers_module._PACKAGES)
    assert set(get_args(choices)) <= set(LOGGER_TYPE_TO_CLASS)


def test_a_tracker_that_does_not_start_is_refused_by_name(tmp_path: Path) -> None:
    with writer(tmp_path) as metrics:
        metrics.log_step(step_metrics(10))
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    with pytest.raises(LaunchError, match=r"logging\.trackers = 'tensorboard': .* cannot start"):
        writer(tmp_path, trackers=("tensorboard",))
    assert [line["step"] for line in lines_of(tmp_path)] == [10]


def test_a_tracker_that_fails_later_is_reported_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with writer(tmp_path, trackers=("tensorboard",)) as metrics:
        (tracker,) = metrics._trackers._trackers.values()
        tracker.writer.close()
        tracker.writer = None  # what is left of it after a lost connection, say
        metrics.log_step(step_metrics(10))
        metrics.log_step(step_metrics(20))
    assert [line["step"] for line in lines_of(tmp_path)] == [10, 20]
    assert capsys.readouterr().err.count("tracker tensorboard failed") == 1


def test_flatten_keeps_plain_values_and_writes_out_the_rest() -> None:
    tree = {"a": {"b": 1, "c": {"d": "x"}}, "e": (0.9, 0.95), "f": None, "g": True}
    assert flatten(tree) == {"a.b": 1, "a.c.d": "x", "e": "(0.9, 0.95)", "f": "None", "g": True}


def test_memory_of_a_process_is_its_own_peak() -> None:
    # A process of its own: the peak of this one may lie far above what it holds now.
    code = (
        "from bigtrain.run.reporting.metrics import memory_gib\n"
        "before = memory_gib('cpu')\n"
        "block = bytearray(b'x') * (256 * 2**20)\n"
        "during = memory_gib('cpu')\n"
        "del block\n"
        "print(before, during, memory_gib('cpu'))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    before, during, after = map(float, result.stdout.split())
    assert before < 1
    assert during >= before + 0.2
    assert after >= before + 0.2  # a peak; the kernel counts it to a few pages


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0s"),
        (59.6, "1m00s"),
        (250, "4m10s"),
        (11220, "3h07m"),
        (190800, "2d05h"),
        (math.inf, "?"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_numbers() -> None:
    assert [format_lr(lr) for lr in (1e-3, 2.5e-10, 0.0, 1.0)] == [
        "1.00e-3",
        "2.50e-10",
        "0",
        "1.00e+0",
    ]
    assert [format_rate(rate) for rate in (5300.4, 0.256)] == ["5,300", "0.26"]


def test_events_go_by_the_samples_they_concern(tmp_path: Path) -> None:
    """A run that rolls back does its steps again, but reads no sample twice."""
    with writer(tmp_path) as metrics:
        for step in (1, 2, 3):
            metrics.log_step(step_metrics(step))
        metrics.log_event("skipped", step=3, first_sample=32, num_samples=16, loss=math.nan)
        metrics.roll_back(1, samples=48)
        metrics.log_event("rolled_back", step=3, first_sample=16, num_samples=32, to_step=1)
        metrics.log_step(step_metrics(2))
        metrics.log_event("skipped", step=3, first_sample=64, num_samples=16, loss=9.0)
    kinds = [(line["step"], line.get("event")) for line in lines_of(tmp_path)]
    rest = [(3, "skipped"), (3, "rolled_back"), (2, None)]
    assert kinds == [(1, None), *rest, (3, "skipped")]
    assert lines_of(tmp_path)[1]["loss"] is None
    # A resume at step 2, which had read 64 samples: the last event comes again.
    with writer(tmp_path, resume_step=2, resume_samples=64):
        pass
    assert [(line["step"], line.get("event")) for line in lines_of(tmp_path)] == [(1, None), *rest]


def test_bits_per_byte_and_tasks(tmp_path: Path) -> None:
    whole, tasks = HeldOutLoss(2.0, 512, 1.25), {"tasks/arc_easy/acc": 0.5, "tasks/arc_easy/x": 1.0}
    with writer(tmp_path, trackers=("tensorboard",)) as metrics:
        metrics.log_evaluation(20, whole, {"only": whole})
        metrics.log_evaluation(30, tasks=tasks)
    first, second = lines_of(tmp_path)
    assert first["held_out_bits_per_byte"] == 1.25
    assert "held_out_sources" not in first
    assert second == {"step": 30, "tasks": {"arc_easy/acc": 0.5, "arc_easy/x": 1.0}}
    log = (tmp_path / "log.txt").read_text()
    assert "perplexity 7.39 bits/byte 1.2500\n" in log
    assert "step 30/400 tasks arc_easy/acc 0.5000, arc_easy/x 1.0000\n" in log
    assert read_scalars(tmp_path)["tasks/arc_easy/acc"] == [(30, 0.5)]


def test_a_launch_that_was_overtaken_adds_no_lines(tmp_path: Path) -> None:
    """It has the file open, and writes after the later launch has dropped lines of its steps."""
    with writer(tmp_path) as older:
        for step in (1, 2, 3):
            older.log_step(step_metrics(step))
        with writer(tmp_path, resume_step=2, resume_samples=16) as newer:
            older.log_step(step_metrics(4, loss=1.0))
            newer.log_step(step_metrics(3, loss=2.0))
            older.log_step(step_metrics(5, loss=1.0))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 6.0), (2, 6.0), (3, 2.0)]


def test_a_stale_launch_writes_neither_lines_nor_samples(tmp_path: Path) -> None:
    stale = False
    with writer(tmp_path, is_stale=lambda: stale) as metrics:
        metrics.log_step(step_metrics(1))
        stale = True
        metrics.log_step(step_metrics(2))
        metrics.log_samples(2, [("a", "b")])
        metrics.roll_back(0, 0)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1]
    assert not (tmp_path / "samples.jsonl").exists()
