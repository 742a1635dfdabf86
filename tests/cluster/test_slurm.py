"""Real Slurm: two nodes, sbatch, what it leaves behind."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import psutil
import pytest

from bigtrain.cli import main as bigtrain
from bigtrain.run.checkpointing import checkpoints
from tests.cluster.conftest import TRAIN, Lab, Submit
from tests.launch.conftest import Inputs, metrics, snapshot
from tests.support.cluster import BINARIES, wait_until
from tests.support.worlds import ROOT

SBATCH = ROOT / "slurm" / "train.sbatch"
NODE = ["--gpus-per-node=1", "--cpus-per-task=1", "--mem=1000", "--time=10"]
TWO_NODES = ["--nodes=2", "--signal=B:USR1@60", *NODE]
# Long enough to be stopped on its way; saved only when told, unless a test says otherwise.
STEPS = 200
LONG = [
    f"train.steps={STEPS}",
    "evaluation.every_steps=100000",
    "checkpoint.every_steps=100000",
    "output.export=false",
]
FINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def told(lab: Lab, job: str, name: str) -> str:
    """What `scontrol show job` says of `job` under `name`."""
    _, output = lab.run("n0", "scontrol", "show", "job", job)
    return next(word for word in output.split() if word.startswith(f"{name}=")).split("=")[1]


def state(lab: Lab, job: str) -> str:
    """Slurm's word for the state of `job`."""
    return told(lab, job, "JobState")


def completions(lab: Lab, job: str) -> list[str]:
    """State and exit code of `job` in the log of completed jobs, for every time that it ended."""
    lines = (lab.cluster.state / "jobcomp.log").read_text().splitlines()
    states = []
    for line in lines:
        told = dict(word.partition("=")[::2] for word in line.split())
        if told["JobId"] == job:
            states.append(f"{told['JobState']} {told['ExitCode']}")
    return states


def ended(lab: Lab, job: str, log: Path, timeout: float = 200) -> str:
    """The final state of `job`, once it has one."""
    try:
        wait_until("the job ends", lambda: state(lab, job) in FINAL, timeout)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{log.read_text() if log.exists() else 'no log'}") from None
    return state(lab, job)


def test_two_nodes_compute_what_one_process_does(
    lab: Lab, submit: Submit, alone: dict[int, float]
) -> None:
    """With the script that `bigtrain launch slurm` writes."""
    script = lab.folder / "job.sbatch"
    command = ["launch", "slurm", "--config", str(lab.run_yaml), "--deepspeed_config", "zero2"]
    size = ["--nodes", "2", "--gpus-per-node", "1", "--time", "10", "--save-seconds", "60"]
    options = ["--sbatch", "mem=1000", "--sbatch", "cpus-per-task=1", "--output", str(script)]
    assert bigtrain([*command, *size, *options]) == 0
    job, log = submit(script, [], [])
    assert ended(lab, job, log) == "COMPLETED", log.read_text()
    assert "n[1-2], 1 processes on each of 2 nodes" in log.read_text()
    assert metrics(lab.folder / "run") == pytest.approx(alone, abs=1e-5)
    assert told(lab, job, "ExitCode") == "0:0"
    assert completions(lab, job) == ["COMPLETED 0:0"]


@pytest.mark.slow
def test_srun_starts_every_rank_itself(lab: Lab, submit: Submit, alone: dict[int, float]) -> None:
    """Two tasks on each of two nodes, and two steps at once in one job: no launcher, no address."""
    script = lab.folder / "ranks.sbatch"
    srun = f"srun --overlap --ntasks=4 --kill-on-bad-exit=1 {sys.executable}"
    run = f"{srun} {TRAIN} batch.micro_batch_size=1 --config {lab.run_yaml}"
    script.write_text(
        "#!/bin/bash\nunset MASTER_ADDR MASTER_PORT\n"
        f"{run} & first=$!\n"
        f"{run} output.directory={lab.folder / 'other'} || exit 1\n"
        "wait $first\n"
    )
    node = ["--nodes=2", "--ntasks-per-node=2", "--mem=2000", "--time=10"]
    job, log = submit(script, node, [])
    assert ended(lab, job, log) == "COMPLETED", log.read_text()
    for name in ("run", "other"):
        assert metrics(lab.folder / name) == pytest.approx(alone, abs=1e-5)
        assert '"world_size": 4' in (lab.folder / name / "starts.jsonl").read_text()


@pytest.mark.slow
def test_wrong_run_fails_before_a_process_starts(lab: Lab, submit: Submit) -> None:
    job, log = submit(SBATCH, TWO_NODES, [lab.run_yaml, "batch.micro_batch_size=5"])
    assert ended(lab, job, log) == "FAILED"
    assert "batch.global_batch_size = 12: must be a multiple of" in log.read_text()
    assert "srun" not in log.read_text()
    assert not (lab.folder / "run").exists()
    assert told(lab, job, "ExitCode") == "2:0"
    assert completions(lab, job) == ["FAILED 2:0"]


@pytest.mark.slow
def test_port_that_is_taken(lab: Lab, submit: Submit) -> None:
    listen = "import socket, time; s = socket.create_server(('', 29555)); print(1); time.sleep(900)"
    holder = lab.cluster.start("n1", "python3", "-uc", listen, cwd=lab.folder)
    assert holder.stdout.readline() == "1\n"
    job, log = submit(SBATCH, [*TWO_NODES, "--export=ALL,MASTER_PORT=29555"], [lab.run_yaml])
    assert ended(lab, job, log) == "FAILED"
    assert "port 29555 of n1 cannot be used: set another MASTER_PORT, or none" in log.read_text()
    assert completions(lab, job) == ["FAILED 2:0"]
    assert not (lab.folder / "run").exists()


def steps_logged(lab: Lab) -> int:
    """Steps that stand in the run's metrics so far."""
    path = lab.folder / "run" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def resumed(log: Path) -> list[int]:
    """The steps at which the starts of a job went on."""
    text = log.read_text() if log.exists() else ""
    return [int(step) for step in re.findall(r"^resumed at step (\d+) ", text, flags=re.M)]


def wait_for_resume(lab: Lab, log: Path, number: int) -> int:
    """Until the `number`-th start that went on makes steps; returns the step it went on at."""
    wait_until(f"it goes on, time {number}", lambda: len(resumed(log)) == number, 250)
    step = resumed(log)[-1]
    wait_until("some steps more", lambda: steps_logged(lab) >= step + 5, 100)
    return step


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_outlives_its_time_limit_and_a_hang(lab: Lab, submit: Submit) -> None:
    """Of the hang Slurm knows nothing, whose nodes are well: the process on n2 is stopped."""
    limits = ["watchdog.timeout_seconds=10", "watchdog.slow_timeout_seconds=120"]
    arguments = [lab.run_yaml, *LONG, *limits, "checkpoint.every_steps=20"]
    job, log = submit(SBATCH, TWO_NODES, arguments)
    wait_until("some steps", lambda: steps_logged(lab) >= 5, 250)
    # What --signal=B:USR1@60 sends nine minutes from now; the real timer has a test below.
    code, output = lab.run("n0", "scancel", "--batch", "--signal=USR1", job)
    assert code == 0, output
    step = wait_for_resume(lab, log, 1)
    story = log.read_text()
    assert f"stopped by SIGUSR1 after step {step} of {STEPS}" in story
    assert story.count("near the time limit, saving") == 1
    assert story.count("saved; back into the queue") == 1

    processes = [p for p in lab.cluster.processes("n2", "train.py --config") if is_training(p)]
    assert len(processes) == 1
    newest = checkpoints.list_steps(lab.folder / "run")[-1]
    processes[0].suspend()
    assert wait_for_resume(lab, log, 2) >= newest
    assert ended(lab, job, log, 300) == "COMPLETED", log.read_text()
    story = log.read_text()
    assert "rank 1 on n2 does not respond" in story
    assert story.count("nothing moved, see ") == 1
    assert story.count("back into the queue") == 2
    assert "start 3: n[1-2]" in story
    assert told(lab, job, "Restarts") == "2"
    assert told(lab, job, "ExitCode") == "0:0"
    # PENDING is what Slurm writes down of a job that was put back into the queue.
    assert completions(lab, job) == ["PENDING 0:0", "PENDING 0:0", "COMPLETED 0:0"]
    assert list(metrics(lab.folder / "run")) == list(range(1, STEPS + 1))
    assert not (lab.folder / "run" / "requeue").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_signal_before_the_first_step_requeues(lab: Lab, submit: Submit) -> None:
    """The warning comes while processes are started, who cannot hear it yet."""
    job, log = submit(SBATCH, TWO_NODES, [lab.run_yaml])
    wait_until("it starts", lambda: log.exists() and "start 1: " in log.read_text(), 100)
    code, output = lab.run("n0", "scancel", "--batch", "--signal=USR1", job)
    assert code == 0, output
    assert ended(lab, job, log, 300) == "COMPLETED", log.read_text()
    story = log.read_text()
    assert "near the time limit, saving" in story
    assert "stopped before its first step; back into the queue" in story
    assert "train.py: stopped by SIGUSR1 before the first step" in story
    assert "Traceback" not in story
    assert told(lab, job, "Restarts") == "1"
    assert list(metrics(lab.folder / "run")) == list(range(1, 13))


def is_training(process: psutil.Process) -> bool:
    """Whether it is one of a run's processes, not what started them."""
    command = process.cmdline()
    return process.name() != "srun" and "bigtrain.launchers.agent" not in command


def idle(lab: Lab) -> str:
    """Nodes without a job, in Slurm's notation."""
    return lab.run("n0", "sinfo", "-h", "-t", "idle", "-o", "%N")[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_cancelled_run_submitted_again_outlives_a_node_failure(lab: Lab, submit: Submit) -> None:
    options = ["--nodes=1-2", "--signal=B:USR1@60", *NODE]
    arguments = [lab.run_yaml, *LONG, "checkpoint.every_steps=20"]
    job, log = submit(SBATCH, options, arguments)
    wait_until("a save", lambda: checkpoints.list_steps(lab.folder / "run"), 250)
    newest = checkpoints.list_steps(lab.folder / "run")[-1]
    lab.run("n0", "scancel", job)
    assert ended(lab, job, log) == "CANCELLED", log.read_text()
    wait_until("its nodes are free", lambda: "n[1-2]" in idle(lab))
    assert state(lab, job) == "CANCELLED"
    assert told(lab, job, "Restarts") == "0"
    assert completions(lab, job) == ["CANCELLED 0:0"]
    assert "back into the queue" not in log.read_text()

    job, log = submit(SBATCH, options, arguments, name="again.log")
    assert wait_for_resume(lab, log, 1) >= newest
    newest = checkpoints.list_steps(lab.folder / "run")[-1]
    update = ["scontrol", "update", "nodename=n2", "reason=test"]
    try:
        for new in ("down", "drain"):  # drained, it does not come back by itself
            code, output = lab.run("n0", *update, f"state={new}")
            assert code == 0, output
        assert ended(lab, job, log, 300) == "COMPLETED", log.read_text()
    finally:
        lab.run("n0", *update, "state=resume")
    story = log.read_text()
    assert "start 1: n[1-2], 1 processes on each of 2 nodes" in story
    assert "start 2: n1, 1 processes on each of 1 nodes" in story
    assert len(resumed(log)) == 2
    assert resumed(log)[1] >= newest
    assert told(lab, job, "Restarts") == "1"
    assert told(lab, job, "ExitCode") == "0:0"
    assert completions(lab, job) == ["NODE_FAIL 0:0", "COMPLETED 0:0"]
    assert list(metrics(lab.folder / "run")) == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_tokens_of_an_array_are_those_of_one_process(
    lab: Lab, inputs: Inputs, submit: Submit
) -> None:
    node = ["--cpus-per-task=1", "--mem-per-cpu=500", "--time=10", "--wait"]
    arguments: list[str | Path] = ["--input", inputs.texts, "--tokenizer", inputs.tokenizer]
    arguments += ["--held-out", "0.1", "--output", lab.folder / "shards"]
    _, log = submit(ROOT / "slurm" / "tokenize.sbatch", ["--array=0-2", *node], arguments)
    assert (lab.folder / "shards" / "manifest.json").exists(), log.read_text()
    assert snapshot(lab.folder / "shards") == snapshot(inputs.shards)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_after_a_link_cut_only_the_requeued_run_writes(lab: Lab, submit: Submit) -> None:
    """A node computes on without its cable, while Slurm takes it for dead and starts the run anew.

    Both see the run directory, as two hosts see one whose storage has a network of its own.
    """
    endless = ["train.steps=1000000", *LONG[1:], "checkpoint.every_steps=20"]
    # The script's own 600 s are all of this job's time limit: it would be told at once to save.
    options = ["--nodes=1", "--signal=B:USR1@60", *NODE]
    job, log = submit(SBATCH, options, [lab.run_yaml, *endless])
    wait_until("some steps", lambda: steps_logged(lab) >= 25, 250)
    cut_off = told(lab, job, "NodeList")
    other = {"n1": "n2", "n2": "n1"}[cut_off]
    older = [p for p in lab.cluster.processes(cut_off, "train.py --config") if p.name() != "srun"]
    assert older
    lab.cluster.link(cut_off, "down")
    wait_until("Slurm starts it elsewhere", lambda: f"start 2: {other}" in log.read_text(), 200)
    wait_until("it goes on", lambda: "resumed at step " in log.read_text(), 200)
    # Cut off all the while, and ended by nobody but itself.
    wait_until("the older run ends", lambda: not any(p.is_running() for p in older), 60)
    before = steps_logged(lab)
    wait_until("the newer one goes on alone", lambda: steps_logged(lab) >= before + 25, 100)

    lab.run("n0", "scancel", job)
    assert ended(lab, job, log) == "CANCELLED", log.read_text()
    assert completions(lab, job) == ["NODE_FAIL 0:0", "CANCELLED 0:0"]
    wait_until("nobody writes", lambda: not lab.cluster.processes(other, "train.py --config"))
    run = lab.folder / "run"
    steps = list(metrics(run))  # each stands there once
    assert steps == list(range(1, len(steps) + 1))
    assert bigtrain(["verify", "--run", str(run)]) == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_real_timer(lab: Lab, submit: Submit) -> None:
    """However quick this machine is, the run has more steps than fit into two minutes."""
    node = ["--nodes=2", "--gpus-per-node=1", "--cpus-per-task=1", "--mem=1000"]
    options = [*node, "--time=2", "--signal=B:USR1@30"]
    job, log = submit(SBATCH, options, [lab.run_yaml, "train.steps=1000000", *LONG[1:]])

    def went_on() -> bool:
        return log.exists() and "resumed at step " in log.read_text()

    wait_until("the run goes on after its time limit", went_on, 800)
    lab.run("n0", "scancel", job)
    assert ended(lab, job, log) == "CANCELLED"
    story = log.read_text()
    assert story.index("near the time limit") < story.index("saved; back into the queue")
    assert story.index("saved; back into the queue") < story.index("resumed at step ")
    steps = list(metrics(lab.folder / "run"))
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_limit_without_a_warning_requeues_and_scancel_does_not(lab: Lab, submit: Submit) -> None:
    """Slurm ends the job at its limit of one minute, with the signals that scancel sends."""
    options = ["--nodes=2", "--signal=B:CONT@10", *NODE[:-1], "--time=1"]
    endless = ["train.steps=1000000", *LONG[1:], "checkpoint.every_steps=20"]
    job, log = submit(SBATCH, options, [lab.run_yaml, *endless])
    wait_until("a save", lambda: checkpoints.list_steps(lab.folder / "run"), 100)
    newest = checkpoints.list_steps(lab.folder / "run")[-1]
    assert wait_for_resume(lab, log, 1) >= newest
    story = log.read_text()
    assert "the time limit is reached; back into the queue" in story
    assert "give more seconds" not in story
    lab.run("n0", "scancel", job)
    assert ended(lab, job, log) == "CANCELLED", log.read_text()
    wait_until("its nodes are free", lambda: "n[1-2]" in idle(lab))
    story = log.read_text()
    assert story.count("back into the queue") == 1
    assert "train.sbatch: cancelled; what is not saved" in story
    assert "Traceback" not in story
    assert told(lab, job, "Restarts") == "1"
    assert state(lab, job) == "CANCELLED"
    steps = list(metrics(lab.folder / "run"))
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.slow
def test_hosts_of_a_job_are_those_that_slurm_says(lab: Lab, nodes: None) -> None:
    command = f"{BINARIES / 'python'} -m bigtrain.cli hostfile --slurm"
    script = f"{command} && scontrol show hostnames"
    allocation = ["salloc", "--quiet", "--nodes=2", "--gpus-per-node=2", "--mem=100"]
    code, output = lab.run("n0", *allocation, "sh", "-c", script)
    assert code == 0, output
    assert output.splitlines() == ["n1 slots=2", "n2 slots=2", "n1", "n2"]
