"""train.py as users start it: the same run under every launcher, stopped, resumed and exported."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bigtrain.cli import main as bigtrain
from bigtrain.run.checkpointing import checkpoints
from bigtrain.settings.degrees import AXES
from tests.launch.conftest import (
    STEPS,
    TRAIN,
    VOCAB_SIZE,
    ZERO3,
    Inputs,
    launcher,
    metrics,
    snapshot,
    start,
    train,
    trained,
    wait,
)
from tests.support.cluster import wait_until
from tests.support.lives import shared_server
from tests.unit.run.reporting.test_metrics import FIELDS

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

LAUNCHERS = ("deepspeed", "torchrun", "accelerate")
PROFILED = ["profile.steps=[2,3]", "profile.ranks=[1]"]


@pytest.fixture(scope="module")
def forked_run(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the same run on two forked processes, with the argument that DeepSpeed's
    launcher adds and a profile of two steps."""
    directory = tmp_path_factory.mktemp("forked") / "run"
    trained("--local_rank=0", *arguments(inputs, directory), *PROFILED, num_processes=2)
    return directory


@pytest.mark.slow
def test_profiled_steps_leave_a_trace(forked_run: Path, finished_run: Path) -> None:
    (path,) = (forked_run / "profile").iterdir()
    assert path.name == "rank_1_steps_2-3.json"
    trace = json.loads(path.read_text())
    names = {event.get("name", "") for event in trace["traceEvents"]}
    assert {"aten::mm", "aten::embedding"} <= names
    assert not (finished_run / "profile").exists()


def arguments(inputs: Inputs, directory: Path) -> list[str | Path]:
    paths = ["--config", inputs.run_yaml, "--deepspeed_config", ZERO3]
    return [*paths, f"output.directory={directory}"]


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def test_two_processes_compute_what_one_does(forked_run: Path, finished_run: Path) -> None:
    alone = metrics(finished_run)
    assert list(alone) == list(range(1, STEPS + 1))
    assert alone[STEPS] < alone[1] - 0.3
    assert metrics(forked_run) == pytest.approx(alone, abs=1e-5)


SHORT = (
    *("train.steps=2", "output.export=false", "evaluation.every_steps=null"),
    *("schedule.warmup_steps=0", "checkpoint.every_steps=null"),
)
COMPARED = ("loss", "grad_norm", "lr", "tokens", "samples", "held_out_loss")
# In place of train.py: writes down what the launcher gave it, and ends with the code that it reads.
HANDED = """
import json, os, pathlib, sys
here, rank = pathlib.Path(__file__).parent, os.environ["RANK"]
given = {"environment": dict(os.environ), "arguments": sys.argv[1:]}
(here / f"new-{rank}").write_text(json.dumps(given))
(here / f"new-{rank}").rename(here / f"given-{rank}")
sys.exit(int((here / f"code-{rank}").read_text()))
"""


def test_every_launcher_starts_the_same_run(inputs: Inputs, home: Path, tmp_path: Path) -> None:
    """By variables and arguments as each gives them to two processes, which hand them to forked
    ones; meanwhile a train.py that is not forked."""
    alone = start([TRAIN, *arguments(inputs, tmp_path / "python"), *SHORT], home)
    processes = {}
    for name in LAUNCHERS:
        (tmp_path / f"of-{name}").mkdir()
        worker = tmp_path / f"of-{name}" / "worker.py"
        worker.write_text(HANDED)
        for rank in (0, 1):
            os.mkfifo(worker.with_name(f"code-{rank}"))
        command = [*launcher(name)[:-1], worker, *arguments(inputs, tmp_path / name), *SHORT]
        processes[name] = start(command, home)
    trained(*arguments(inputs, tmp_path / "forked"), *SHORT, num_processes=2)
    for name, process in processes.items():
        given = [tmp_path / f"of-{name}" / f"given-{rank}" for rank in (0, 1)]

        def has_ended(given: list[Path] = given, process: Any = process) -> bool:
            return all(path.exists() for path in given) or process.poll() is not None

        wait_until(f"{name} starts processes", has_ended, 200)
        assert process.poll() is None, wait(process)
        first, second = map(read_json, given)
        assert {*first["arguments"]} ^ {*second["arguments"]} <= {
            "--local_rank=0",
            "--local_rank=1",
        }
        environments = [first["environment"], second["environment"]]
        codes, output = shared_server().live(first["arguments"], environments=environments)
        for rank, code in enumerate(codes):
            (tmp_path / f"of-{name}" / f"code-{rank}").write_text(str(code))
        assert codes == [0, 0], (name, output)
        finished = wait(process)
        assert finished.code == 0, (name, finished.output)
        for key in COMPARED:
            assert metrics(tmp_path / name, key) == metrics(tmp_path / "forked", key), (name, key)
    finished = wait(alone)
    assert finished.code == 0, finished.output
    trained(*arguments(inputs, tmp_path / "one"), *SHORT)
    for key in COMPARED:
        assert metrics(tmp_path / "python", key) == metrics(tmp_path / "one", key), key


@pytest.mark.slow
def test_every_launcher_starts_train_py(inputs: Inputs, home: Path, tmp_path: Path) -> None:
    """Side by side, for most of the time is imports."""
    processes = {
        name: start([*launcher(name), *arguments(inputs, tmp_path / name), *SHORT], home)
        for name in LAUNCHERS
    }
    for name, process in processes.items():
        finished = wait(process)
        assert finished.code == 0, (name, finished.output)
    trained(*arguments(inputs, tmp_path / "forked"), *SHORT, num_processes=2)
    for name in LAUNCHERS:
        for key in COMPARED:
            assert metrics(tmp_path / name, key) == metrics(tmp_path / "forked", key), (name, key)


@pytest.mark.parametrize("name", ["finished_run", "forked_run"])
def test_run_directory_is_whole(name: str, inputs: Inputs, request: pytest.FixtureRequest) -> None:
    run = request.getfixturevalue(name)
    assert {path.name for path in run.iterdir()} == {
        "checkpoints",
        "config.json",
        "deepspeed.json",
        "environment.json",
        "exported.json",
        "generations",
        "run_id",
        "hf",
        "log.txt",
        "metrics.jsonl",
        "model_config",
        "prediction.json",
        "starts.jsonl",
        "tokenizer",
        *(["profile"] if name == "forked_run" else []),
    }
    assert checkpoints.list_steps(run) == [8, 12]  # keep_last: 2
    assert {path.name for path in (run / "checkpoints").iterdir()} == {
        "step-00000008",
        "step-00000012",
    }
    assert checkpoints.find_corruption(run / "checkpoints" / "step-00000012", "all") is None
    world_size = 1 if name == "finished_run" else 2
    environment = read_json(run / "environment.json")
    assert environment["topology"]["world_size"] == world_size
    assert environment["rank_order"] == list(AXES)
    assert list(environment["hosts"].values()) == [list(range(world_size))]
    assert {"bigtrain", "torch", "deepspeed", "transformers", "git_commit"} <= environment.keys()
    assert read_json(run / "config.json")["data"]["path"] == str(inputs.shards)
    rendered = read_json(run / "deepspeed.json")
    assert rendered["zero_optimization"]["stage"] == (0 if name == "finished_run" else 3)
    assert "auto" not in (run / "deepspeed.json").read_text()
    log = (run / "log.txt").read_text()
    assert f"step {STEPS}/{STEPS} loss" in log
    assert ("2 ranks = 2 data-parallel; rank = data" in log) == (world_size == 2)
    assert f"checkpoint of step {STEPS}" in log
    assert "same logits" in log
    assert len({path.stat().st_mode for path in (run / "hf").iterdir()}) == 1


def test_metrics_hold_exactly_the_documented_fields(finished_run: Path) -> None:
    lines = [json.loads(line) for line in (finished_run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    evaluations = [line for line in lines if "loss" not in line]
    assert len(steps) == STEPS
    assert all(list(line) == [*FIELDS, "breakdown"] for line in steps)
    assert steps[-1]["samples"] == 8 * STEPS
    assert steps[-1]["tokens"] == 8 * 32 * STEPS
    figures = ("loss", "perplexity", "tokens", "bits_per_byte")
    names = ["step", *(f"held_out_{name}" for name in figures)]
    assert [list(line) for line in evaluations] == [names, names]
    assert [line["step"] for line in evaluations] == [6, 12]
    assert steps[1]["lr"] == pytest.approx(5e-3)
    assert steps[0]["lr"] == pytest.approx(2.5e-3)  # half-way up the warm-up of two steps


def test_plain_transformers_loads_the_export(forked_run: Path, finished_run: Path) -> None:
    texts = "Ada proved a theorem. 東京"
    answers = []
    for run in (finished_run, forked_run):
        model = AutoModelForCausalLM.from_pretrained(run / "hf")
        tokenizer = AutoTokenizer.from_pretrained(run / "hf")
        assert model.config.vocab_size == VOCAB_SIZE
        assert model.dtype == torch.float32
        assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
        ids = tokenizer(texts, return_tensors="pt").input_ids
        assert tokenizer.decode(ids[0]) == texts
        with torch.no_grad():
            answers.append(model(input_ids=ids, labels=ids))
    # Trained on just such sentences, and the same at any world size.
    assert float(answers[0].loss) < metrics(finished_run)[1]
    torch.testing.assert_close(answers[0].logits, answers[1].logits, atol=1e-4, rtol=1e-4)


def test_generate_continues_a_prompt(
    finished_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", "--model", str(finished_run / "hf"), "--prompt", "Emmy proved"]
    printed = []
    for temperature in ("0", "1.5", "1.5"):
        assert bigtrain([*command, "--max-new-tokens", "8", "--temperature", temperature]) == 0
        printed.append(capsys.readouterr().out)
    assert all(text.startswith("Emmy proved") for text in printed)
    assert len(printed[1]) > len("Emmy proved\n")
    assert printed[1] == printed[2]  # the same seed


def test_export_writes_the_same_bytes_again(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bigtrain(["export", "--run", str(finished_run), "--output", str(tmp_path / "hf")]) == 0
    assert f"step {STEPS}" in capsys.readouterr().out
    for file in (finished_run / "hf").iterdir():
        assert (tmp_path / "hf" / file.name).read_bytes() == file.read_bytes(), file.name
    assert len(list((tmp_path / "hf").iterdir())) == len(list((finished_run / "hf").iterdir()))


def test_export_of_an_earlier_step_in_another_dtype(finished_run: Path, tmp_path: Path) -> None:
    command = ["export", "--run", str(finished_run), "--output", str(tmp_path / "hf")]
    assert bigtrain([*command, "--step", "8", "--dtype", "bfloat16"]) == 0
    earlier = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert earlier.dtype == torch.bfloat16
    last = AutoModelForCausalLM.from_pretrained(finished_run / "hf")
    assert not torch.allclose(earlier.lm_head.weight.float(), last.lm_head.weight, atol=1e-4)


def test_finished_run_started_again_stays_as_it_is(
    finished_run: Path, inputs: Inputs, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    exported = (run / "hf/config.json").stat().st_ino
    # The second asks for fewer steps, which only a word of the user's allows.
    fewer = ["train.steps=6", "checkpoint.allow_changes=[train.steps]"]
    for changes, steps in (([], STEPS), (fewer, 6)):
        again = ["--config", inputs.run_yaml, f"output.directory={run}", *changes]
        output = trained(*again)
        assert f"complete: the run is at step {STEPS} of {steps}; nothing to do" in (output)
        assert "no step after" not in output
        assert snapshot(run) == snapshot(finished_run)
        assert (run / "hf/config.json").stat().st_ino == exported  # not written once more


def test_logged_loss_is_the_mean_since_the_last_line(
    finished_run: Path, inputs: Inputs, tmp_path: Path
) -> None:
    """After a resume between two lines, since the resume."""
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    shutil.rmtree(run / "checkpoints/step-00000012")
    again = ["--config", inputs.run_yaml, f"output.directory={run}", "logging.every_steps=5"]
    trained(*again)
    each, logged = metrics(finished_run), metrics(run)
    assert sorted(logged) == [*range(1, 9), 10, 12]
    # All steps have as many target tokens; losses are summed in float64.
    assert logged[10] == pytest.approx((each[9] + each[10]) / 2, rel=1e-12)
    assert logged[12] == pytest.approx((each[11] + each[12]) / 2, rel=1e-12)


def test_export_that_was_cut_off_is_made_good(
    finished_run: Path, inputs: Inputs, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    (run / "exported.json").unlink()
    (run / "hf/model.safetensors").write_bytes(b"of an earlier step")
    again = ["--config", inputs.run_yaml, f"output.directory={run}"]
    output = trained(*again)
    assert "exported to" in output
    for name in ("hf/model.safetensors", "metrics.jsonl", "exported.json"):
        assert (run / name).read_bytes() == (finished_run / name).read_bytes()


def test_corrupt_newest_checkpoint_is_passed_over(
    finished_run: Path, inputs: Inputs, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    [tensors] = (run / "checkpoints" / "step-00000012" / "tensors").glob("*.safetensors")
    os.truncate(tensors, tensors.stat().st_size - 1)
    again = ["--config", inputs.run_yaml, f"output.directory={run}"]
    output = trained(*again)
    passed_over = f"skipping corrupt checkpoint at step 12: {tensors}: "
    for text in (output, (run / "log.txt").read_text()):
        assert passed_over in text
        assert "resumed at step 8 " in text
        assert "metrics.jsonl: dropped" in text
    for key in ("loss", "grad_norm", "lr", "samples", "held_out_loss"):
        assert metrics(run, key) == metrics(finished_run, key), key
    assert checkpoints.find_corruption(run / "checkpoints" / "step-00000012", "all") is None


def test_another_run_is_refused_with_what_differs(
    finished_run: Path, inputs: Inputs, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    changed = [f"output.directory={run}", "optimizer.lr=0.01", "logging.every_steps=2"]
    finished = train("--config", inputs.run_yaml, *changed)
    assert finished.code == 2, finished.output
    assert "Traceback" not in finished.output
    assert finished.output.count("belongs to a run with other settings") == 1
    assert "optimizer.lr: 0.005 there, 0.01 now" in finished.output
    assert "logging" not in finished.output
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before
