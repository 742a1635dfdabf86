"""Callbacks in worlds of two: what they see, requests of any rank, and errors on any rank."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from bigtrain.errors import EXIT_HANG, LaunchError
from bigtrain.run.checkpointing import checkpoints
from tests.launch.conftest import Inputs, metrics
from tests.support.lives import run_script, shared_server
from tests.support.worlds import ROOT

WORKER = ROOT / "tests/launch/extension_worker.py"
TRACED = ("logging.every_steps=2", "checkpoint.keep_last=9")
CODE = """
import json
import bigtrain

class Trace:
    ranks = "all"

    def __init__(self, ends=None, saves=None, fails=None):
        self.ends, self.saves, self.fails = ends, saves, fails

    def _note(self, point, view):
        if [point, view.step, view.rank] == self.fails:
            raise ValueError("as asked")
        if [point, view.step, view.rank] == self.ends:
            view.request_stop("enough")
        if [point, view.step, view.rank] == self.saves:
            view.request_save()
        seen = {
            "point": point, "step": view.step, "samples": view.samples, "tokens": view.tokens,
            "logged": view.metrics.get("step"), "evaluation": sorted(view.evaluation),
            "checkpoint": view.checkpoint and view.checkpoint.name, "by": view.stopped_by,
            "exported": (view.directory / "hf").exists(), "lr": view.config.optimizer.lr,
        }
        with open(f"trace-{view.rank}.jsonl", "a") as file:
            file.write(json.dumps(seen) + "\\n")

    def start(self, view): self._note("start", view)
    def step(self, view):
        bigtrain.record("ranks", 1, "sum")
        bigtrain.record(f"rank{view.rank}", view.step)
        self._note("step", view)
    def evaluation(self, view): self._note("evaluation", view)
    def checkpoint(self, view): self._note("checkpoint", view)
    def end(self, view): self._note("end", view)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "traced.py").write_text(CODE)
    return tmp_path


def run(folder: Path, inputs: Inputs, world_size: int, *overrides: str, **settings: Any) -> str:
    callbacks = json.dumps([{"type": "traced:Trace", "settings": settings}])
    return run_script(
        world_size,
        WORKER,
        folder,
        *("--config", inputs.run_yaml, f"callbacks={callbacks}", "output.directory=run"),
        *("train.steps=6", "checkpoint.every_steps=4", "evaluation.every_steps=3", *overrides),
    )


def trace(folder: Path, rank: int) -> list[dict[str, Any]]:
    text = (folder / f"trace-{rank}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def traced(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two ranks, the second of which asks to save after step 3."""
    folder = tmp_path_factory.mktemp("traced")
    (folder / "traced.py").write_text(CODE)
    run(folder, inputs, 2, *TRACED, saves=["step", 3, 1])
    return folder


@pytest.mark.distributed
def test_every_point_on_every_rank(traced: Path) -> None:
    folder = traced
    first, second = trace(folder, 0), trace(folder, 1)
    for seen in (first, second):
        points = [(one["point"], one["step"]) for one in seen if one["point"] != "checkpoint"]
        steps = [("step", step) for step in range(1, 7)]
        middle, last = ("evaluation", 3), ("evaluation", 6)
        assert points == [("start", 0), *steps[:3], middle, *steps[3:], last, ("end", 6)]
        written = [one["checkpoint"] for one in seen if one["point"] == "checkpoint"]
        assert written == ["step-00000003", "step-00000004", "step-00000006"]
        assert (seen[-1]["exported"], seen[-1]["by"], seen[-1]["lr"]) == (True, None, 5e-3)
        assert [one["samples"] for one in seen if one["point"] == "step"] == [8, 16, 24, 32, 40, 48]
        assert {one["tokens"] // 32 for one in seen} == {0, 8, 16, 24, 32, 40, 48}
    saved = sorted(path.name for path in (folder / "run/checkpoints").glob("step-*"))
    assert saved == written
    logged = [one["logged"] for one in first if one["point"] == "step"]
    assert logged == [None, 2, 2, 4, 4, 6]
    assert {one["logged"] for one in second} == {None}
    assert "held_out_loss" in first[-1]["evaluation"]
    assert metrics(folder / "run", "recorded") == {
        step: {"ranks": 4.0, "rank0": step - 0.5, "rank1": step - 0.5} for step in (2, 4, 6)
    }


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("point", "step", "rank", "ended"),
    [
        pytest.param("start", 0, 1, 1, marks=pytest.mark.slow),
        ("step", 2, 1, 2),
    ],
)
def test_one_rank_asks_to_end(
    inputs: Inputs, folder: Path, point: str, step: int, rank: int, ended: int
) -> None:
    run(folder, inputs, 2, ends=[point, step, rank])
    losses = metrics(folder / "run")
    assert sorted(losses) == [*range(1, ended + 1)]
    assert (folder / f"run/checkpoints/step-{ended:08d}").is_dir()
    assert (folder / "run/hf").is_dir()
    assert sorted(metrics(folder / "run", "held_out_loss"))[-1] == ended
    assert [trace(folder, each)[-1]["point"] for each in (0, 1)] == ["end", "end"]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("point", "step", "rank"),
    [("step", 2, 1), pytest.param("evaluation", 3, 0, marks=pytest.mark.slow)],
)
def test_an_error_ends_all_ranks(
    inputs: Inputs, folder: Path, point: str, step: int, rank: int
) -> None:
    with pytest.raises(LaunchError) as caught:
        run(folder, inputs, 2, fails=[point, step, rank])
    text = str(caught.value)
    assert "exit codes [2, 2]" in text
    line = CODE.splitlines().index('            raise ValueError("as asked")') + 1
    assert (
        f"callbacks.0.type = 'traced:Trace': {point} raised ValueError: as asked "
        f"({folder}/traced.py:{line}) after step {step}" in text
    )
    assert "Traceback" not in text
    # Nobody went on.
    assert max([*metrics(folder / "run"), 0]) <= step


@pytest.mark.distributed
def test_callbacks_change_no_step_and_a_resume_calls_them_again(
    traced: Path, inputs: Inputs, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(traced, folder)
    checkpoints.remove(checkpoints.checkpoint_path(folder / "run", 6))
    run(folder, inputs, 2, *TRACED, "output.export=false", saves=["step", 3, 1])
    points = [(one["point"], one["step"]) for one in trace(folder, 0)]
    assert ("start", 4) in points
    run_script(
        *(2, WORKER, folder, "--config", inputs.run_yaml, "output.directory=plain"),
        *("train.steps=6", "checkpoint.every_steps=4", "evaluation.every_steps=3"),
        *("logging.every_steps=2", "output.export=false"),
    )
    assert metrics(folder / "run") == metrics(folder / "plain")
    assert metrics(folder / "run", "grad_norm") == metrics(folder / "plain", "grad_norm")


PROGRAM = """
import bigtrain

class Last:
    def __init__(self): self.steps, self.ended = [], None
    def step(self, view):
        self.steps.append(view.step)
        if view.step == 3: view.request_stop()
    def end(self, view): self.ended = view.step

last = Last()
result = bigtrain.train_run("{run_yaml}", "output.directory=python", callbacks=[last])
assert (last.steps, last.ended, result.step, result.is_complete) == ([1, 2, 3], 3, 3, True)
for wrong, text in ((Last, "is a class"), (3, "none of the methods")):
    try:
        bigtrain.train_run("{run_yaml}", "output.directory=never", callbacks=[wrong])
    except bigtrain.ConfigError as error:
        assert text in str(error) and "callbacks[0]" in str(error), error
    else:
        raise AssertionError(wrong)
print("program done")
"""


def test_objects_of_a_program(inputs: Inputs, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.replace("{run_yaml}", str(inputs.run_yaml)))
    assert "program done" in run_script(1, WORKER, tmp_path, "page", tmp_path / "program.py")
    assert not (tmp_path / "never").exists()


SLOW = """
import time

class Slow:
    def step(self, view):
        if view.step == 4: time.sleep({seconds})
"""


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("seconds", "slow_timeout", "codes"), [(3, 60, [0, 0]), (60, 3, [EXIT_HANG, EXIT_HANG])]
)
def test_ranks_that_wait_for_a_slow_callback_have_its_limit(
    inputs: Inputs, tmp_path: Path, seconds: int, slow_timeout: int, codes: list[int]
) -> None:
    (tmp_path / "slow.py").write_text(SLOW.format(seconds=seconds))
    words = [
        *("--config", str(inputs.run_yaml), 'callbacks=[{"type": "slow:Slow"}]'),
        *("output.directory=run", "train.steps=6", "output.export=false"),
        *("checkpoint.every_steps=null", "evaluation.every_steps=null"),
        *("watchdog.timeout_seconds=2", f"watchdog.slow_timeout_seconds={slow_timeout}"),
    ]
    ended, text = shared_server().live([], script=[str(WORKER), str(tmp_path), *words])
    assert ended == codes, text
    if EXIT_HANG in codes:
        assert re.search(r"lagging:\n  rank 0 .*: step 4, calling step of a callback", text)


DIFFERENT = """
import os
import bigtrain

class Watch:
    ranks = "all"
    def step(self, view): pass

given = [Watch()] if os.environ["RANK"] == "0" else []
bigtrain.train_run("{run_yaml}", "output.directory=python", callbacks=given)
"""


@pytest.mark.distributed
def test_callbacks_of_some_ranks_only_are_refused(inputs: Inputs, tmp_path: Path) -> None:
    program = DIFFERENT.replace("{run_yaml}", str(inputs.run_yaml))
    (tmp_path / "program.py").write_text(program)
    with pytest.raises(LaunchError) as caught:
        run_script(2, WORKER, tmp_path, "page", tmp_path / "program.py", timeout_seconds=100)
    said = "callbacks: differ between the ranks (rank 0: __main__:Watch; rank 1: none) -> "
    assert said in str(caught.value)
    assert not (tmp_path / "python").exists()
