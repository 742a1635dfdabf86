"""slurm/*.sbatch and what `bigtrain launch slurm` makes of them; tests/cluster runs them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bigtrain.cli import main as bigtrain
from bigtrain.launchers.slurm import time_seconds
from tests.support.worlds import ROOT

SCRIPTS = sorted((ROOT / "slurm").glob("*.sbatch"))


def sbatch_lines(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if "#SBATCH " in line]


def test_scripts_are_sound() -> None:
    for script in SCRIPTS:
        subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("bash reads them; shellcheck is not installed")
    subprocess.run(["shellcheck", "--severity=warning", *SCRIPTS], check=True)


def test_what_requeue_and_resume_rest_on() -> None:
    lines = sbatch_lines((ROOT / "slurm" / "train.sbatch").read_text())
    assert {"--requeue", "--open-mode=append"} <= set(lines)
    # With it Slurm takes the lowest number of a range of nodes.
    assert not any("ntasks" in line for line in lines)
    assert any(line.startswith("--signal=B:USR1@") for line in lines)


def test_script_for_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["launch", "slurm", "--config", "quickstart", "--nodes", "1-2", "--gpus-per-node", "1"]
    options = ["--time", "2:00:00", "--sbatch", "partition=gpu", "--sbatch", "mem=64G"]
    rest = ["--setup", "module load cuda", "--deepspeed_config", "zero3", "seed=1"]
    assert bigtrain([*run, *options, *rest, "--dry-run"]) == 0
    text = capsys.readouterr().out
    lines = sbatch_lines(text)
    assert {"--nodes=1-2", "--gpus-per-node=1", "--time=2:00:00", "--partition=gpu"} <= set(lines)
    assert "--mem=64G" in lines
    assert "--mem=0" not in lines
    assert text.index("#SBATCH --partition") < text.index("set -u")  # sbatch reads no further
    assert "module load cuda\narguments=(quickstart --deepspeed_config zero3 seed=1 " in text
    assert f"checkout={ROOT}\n" in text
    assert f"--chdir={Path.cwd()}" in lines

    output = ["--output", str(tmp_path / "job.sbatch")]
    assert bigtrain([*run, *options, *rest, *output]) == 0
    assert (tmp_path / "job.sbatch").read_text() == text
    capsys.readouterr()
    assert bigtrain([*run, *output]) == 2
    assert "exists and differs" in capsys.readouterr().err
    assert (tmp_path / "job.sbatch").read_text() == text


def test_script_without_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["launch", "slurm", "--config", "quickstart", "--dry-run", "--gpus-per-node", "0"]
    assert bigtrain([*command, "--processes-per-node", "2"]) == 0
    text = capsys.readouterr().out
    assert not any("gpus" in line for line in sbatch_lines(text))
    assert "BIGTRAIN_PROCESSES_PER_NODE=2\n" in text


def test_script_with_spares(capsys: pytest.CaptureFixture[str]) -> None:
    """Spares are nodes beyond --nodes, and a node that fails does not end the job."""
    command = ["launch", "slurm", "--config", "quickstart", "--dry-run", "--gpus-per-node", "1"]
    assert bigtrain([*command, "--nodes", "2", "--spares", "1", "--ranks", "forked"]) == 0
    text = capsys.readouterr().out
    assert {"--nodes=3", "--no-kill"} <= set(sbatch_lines(text))
    assert "BIGTRAIN_SPARES=1 BIGTRAIN_RANKS=forked\n" in text
    assert bigtrain([*command, "--nodes", "1-2", "--spares", "2"]) == 0
    assert "--nodes=3-4" in sbatch_lines(capsys.readouterr().out)
    assert bigtrain([*command, "--nodes", "2"]) == 0
    text = capsys.readouterr().out
    assert "--no-kill" not in sbatch_lines(text)  # so Slurm requeues it
    assert "\nBIGTRAIN_SPARES=" not in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--spares", "-1"], "--spares = -1: is negative -> --spares 0"),
        (["--sbatch", "no-kill"], "--sbatch no-kill = '': is set by bigtrain"),
        (["--nodes", "2-1"], "--nodes = '2-1': is not a number of nodes"),
        (["--time", "soon"], "--time = 'soon': is not a Slurm time limit"),
        (
            ["--time", "5"],
            "--save-seconds = 600: leaves no training time in the time limit 5 = 300 s",
        ),
        (["--sbatch", "nodes=3"], "--sbatch nodes = '3': is set by bigtrain"),
        (["--sbatch", "Bad Name"], "is not an option of sbatch"),
        (["--nodes", "1-3"], "on 3 nodes x 1 processes"),
        (["--setup", "if ["], "bash cannot parse the script"),
        (["--processes-per-node", "2"], "contradicts --gpus-per-node = 1"),
        (["optimizer.lrr=1"], "optimizer.lrr"),
    ],
)
def test_what_cannot_work_is_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "job.sbatch"
    run = ["launch", "slurm", "--config", "quickstart", "--gpus-per-node", "1"]
    assert bigtrain([*run, "--output", str(output), *words]) == 2
    assert said in capsys.readouterr().err
    assert not output.exists()


def test_time_limits() -> None:
    limits = {"90": 5400, "1:30": 90, "2:00:00": 7200, "1-12": 129600, "1-0:30": 88200}
    for text, seconds in {**limits, "x": None, "": None}.items():
        assert time_seconds(text) == seconds


# A Slurm that ends the job while its step runs, by TERM as at a limit and by scancel.
FAKE_SLURM = {
    "scontrol": """\
case "$*" in
*hostnames*) echo localhost ;;
requeue*) echo requeue >> "$CALLS" ;;
*) echo "JobId=7 JobState=COMPLETING Reason=$REASON Dependency=(null)" ;;
esac
""",
    "scancel": 'echo "scancel $*" >> "$CALLS"',
    "srun": 'for name in $SIGNALS; do kill -"$name" "$PPID"; sleep 0.3; done; exit 1',
}


Job = Callable[..., tuple[int, str, list[str]]]


def run_job(
    folder: Path, programs: dict[str, str], *words: str, **own: str
) -> tuple[int, str, list[str]]:
    """Run train.sbatch with `programs` in place of Slurm's: exit code, log, and what was asked of
    them."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in programs.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}")
        (folder / "bin" / name).chmod(0o755)
    (folder / "calls").write_text("")
    variables = {"CALLS": str(folder / "calls"), "BIGTRAIN_CHECKOUT": str(ROOT)}
    variables |= {"SLURM_JOB_ID": "7", "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    finished = subprocess.run(
        ["bash", str(ROOT / "slurm" / "train.sbatch"), *words],
        env={**os.environ, **variables, **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return finished.returncode, finished.stdout, (folder / "calls").read_text().splitlines()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """``job("TERM", "TimeLimit")``: a job that gets this signal while its step runs."""

    def run(signals: str, reason: str) -> tuple[int, str, list[str]]:
        words = ["quickstart", f"output.directory={tmp_path / 'run'}", "batch.micro_batch_size=1"]
        own = {"SIGNALS": signals, "REASON": reason, "BIGTRAIN_PYTHON": sys.executable}
        own |= {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "localhost"}
        return run_job(tmp_path, FAKE_SLURM, *words, **own)

    return run


@pytest.mark.slow  # it waits for real time limits
def test_a_limit_requeues_until_that_leads_nowhere(job: Job, tmp_path: Path) -> None:
    """Three starts without a checkpoint between them; with one it may go on."""
    for _ in range(2):
        code, log, calls = job("TERM", "TimeLimit")
        assert (code, calls.count("requeue")) == (0, 1), log
        assert "the time limit is reached; back into the queue" in log
    code, log, calls = job("TERM", "TimeLimit")
    assert (code, calls.count("requeue")) == (1, 0), log
    assert "the third time without a new checkpoint, so it stays out of the queue" in log
    (tmp_path / "run" / "checkpoints" / "step-00000020").mkdir(parents=True)
    code, log, calls = job("USR1 TERM", "TimeLimit")
    assert code == 0, log
    assert calls.count("requeue") == 1
    assert "scancel --signal=USR1 7" in calls
    assert "not saved in time: give more seconds in --signal=B:USR1@SECONDS" in log


def test_scancel_is_not_taken_for_a_limit(job: Job, tmp_path: Path) -> None:
    code, log, calls = job("TERM", "None")
    assert (code, calls) == (1, []), log
    assert "train.sbatch: cancelled; what is not saved" in log
    assert "give more seconds" not in log
    assert not (tmp_path / "run").exists()


# In place of python: the check, a port, and a server that ends with the run's result.
FAKE_PYTHON = """\
#!{python}
import os, signal, sys
def note(text):
    with open(os.environ["CALLS"], "a") as calls:
        calls.write(text + "\\n")
if "bigtrain.launchers.rendezvous_server" in sys.argv:
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    signal.signal(signal.SIGUSR1, lambda *_: note("ending"))
    signal.signal(signal.SIGUSR2, lambda *_: sys.exit(int(os.environ["RESULT"])))
    note("served at " + sys.argv[-1])
    while True:
        signal.pause()
note(" ".join(sys.argv[1:])) if "check" in sys.argv else None
print(os.environ["RUN"] if "check" in sys.argv else 4321)
"""
FAKE_SRUN = """\
until grep -q "^served at" "$CALLS"; do sleep 0.05; done
echo "srun $*" >> "$CALLS"
[ -n "$SIGNAL" ] || exit 137
kill -"$SIGNAL" "$PPID"
until grep -q ^scancel "$CALLS"; do sleep 0.05; done
exit 137
"""
# Slow enough for the server to have got the signal that was sent before.
FAKE_SCANCEL = """\
for _ in {1..100}; do grep -q ^ending "$CALLS" && break; sleep 0.05; done
echo "scancel $*" >> "$CALLS"
"""


@pytest.fixture
def job_with_spares(tmp_path: Path) -> Job:
    """``job_with_spares("1", 0)``: a job with that many spares whose rendezvous reports that
    result, while the task of a lost node has failed."""
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON.format(python=sys.executable))
    python.chmod(0o755)
    # No seconds pass between the signals of a job.
    fakes = {"srun": FAKE_SRUN, "scancel": FAKE_SCANCEL, "sleep": "exec /bin/sleep 0.05"}

    def run(spares: str, result: int, **variables: str) -> tuple[int, str, list[str]]:
        own = {"RESULT": str(result), "REASON": "None", "SIGNAL": "", "RUN": str(tmp_path / "run")}
        own |= {"SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "n[1-3]"}
        own |= {"BIGTRAIN_PYTHON": str(python), "BIGTRAIN_SPARES": spares, **variables}
        return run_job(tmp_path, {**FAKE_SLURM, **fakes}, "RUN.yaml", **own)

    return run


def test_one_step_of_agents_that_lives_on_without_a_node(job_with_spares: Job) -> None:
    code, log, calls = job_with_spares("1", 0, SLURM_GPUS_ON_NODE="2")
    assert code == 0, log
    assert "train.sbatch: complete" in log
    assert "2 processes on each of 2 nodes, 1 spares" in log
    assert "served at localhost:4321" in calls
    assert [line for line in calls if "--world-size 4 --config RUN.yaml" in line]
    [step] = [line for line in calls if line.startswith("srun ")]
    words = step.split()
    # Every node of the allocation has an agent, and none ends the others.
    assert {"--nodes=3", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--no-kill"} <= set(words)
    assert "--wait=0" in words
    assert {"--nnodes=2", "--nproc_per_node=2", "--rdzv_backend=bigtrain"} <= set(words)
    assert "--rdzv_conf=is_host=0,join_timeout=300,spares=1" in words
    assert {"--max_restarts=100", "--rdzv_endpoint=localhost:4321", "--rdzv_id=7-0"} <= set(words)
    assert "--no-python setpriv --pdeathsig KILL" in step  # ranks on GPUs are new processes
    assert "--fork" not in words

    _, _, calls = job_with_spares("0", 0)
    assert "agent --fork bigtrain.forked_rank --max_restarts=100" in calls[-1]
    assert "--no-python" not in calls[-1]


def test_results_of_a_job_with_spares(job_with_spares: Job) -> None:
    code, log, calls = job_with_spares("1", 75)
    assert (code, calls[-1]) == (0, "requeue")
    assert "fewer nodes are left than the run needs; back into the queue" in log
    code, log, calls = job_with_spares("1", 1)
    assert (code, "requeue" in calls) == (137, False)
    assert "ended with exit code 137" in log


def test_agents_hear_of_the_limit_before_their_ranks(job_with_spares: Job) -> None:
    _, log, calls = job_with_spares("1", 1, SIGNAL="USR1")
    assert "near the time limit, saving" in log
    assert calls.index("ending") < calls.index("scancel --signal=USR1 7")


@pytest.mark.parametrize(
    ("spares", "said"),
    [("x", "BIGTRAIN_SPARES = x: is not a number"), ("3", "= 3: the job has only 3 nodes")],
)
def test_spares_that_cannot_be(spares: str, said: str, job_with_spares: Job) -> None:
    code, log, calls = job_with_spares(spares, 0)
    assert (code, calls) == (2, []), log
    assert said in log


ODD_VARIABLES: dict[str, tuple[dict[str, str | None], str]] = {
    "no nodes": ({"SLURM_JOB_NUM_NODES": None}, "SLURM_JOB_NUM_NODES is not set, which Slurm"),
    "no list": ({"SLURM_JOB_NODELIST": None}, "SLURM_JOB_NODELIST is not set, which Slurm"),
    "GPUs by name": (
        {"SLURM_GPUS_ON_NODE": "a100:4"},
        "SLURM_GPUS_ON_NODE = a100:4: is not a number of at least 1 -> BIGTRAIN_PROCESSES_PER_NODE",
    ),
    "no GPUs": (
        {"SLURM_GPUS_ON_NODE": None},
        "SLURM_GPUS_ON_NODE is not set, and this node has 4 GPUs -> sbatch --gpus-per-node=4, or ",
    ),
    "no processes": (
        {"BIGTRAIN_PROCESSES_PER_NODE": "0"},
        "BIGTRAIN_PROCESSES_PER_NODE = 0: is not a number of at least 1 -> ",
    ),
    "octal": ({"BIGTRAIN_SPARES": "08"}, "BIGTRAIN_SPARES = 08: is not a number of at least 0"),
    "cores": (
        {"SLURM_CPUS_PER_TASK": "64,"},
        "SLURM_CPUS_PER_TASK = 64,: is not a number of at least 1 -> sbatch --cpus-per-task=N",
    ),
    "port": ({"MASTER_PORT": "abc"}, "MASTER_PORT = abc: is not a number"),
    "ranks": ({"BIGTRAIN_RANKS": "fork"}, "BIGTRAIN_RANKS = fork: is none of auto, forked and new"),
    "python": ({"BIGTRAIN_PYTHON": "/no/python"}, "/no/python is not there: set BIGTRAIN_PYTHON"),
    "checkout": ({"BIGTRAIN_CHECKOUT": "/no where"}, "/no where holds no bigtrain/train.py: call"),
}


@pytest.mark.parametrize("name", ODD_VARIABLES)
def test_variables_that_cannot_be(name: str, tmp_path: Path) -> None:
    """One line that names the variable, exit code 2, and no step of Slurm."""
    changes, said = ODD_VARIABLES[name]
    programs = {**FAKE_SLURM, "nvidia-smi": 'for i in 0 1 2 3; do echo "GPU $i: X"; done'}
    own: dict[str, str | None] = {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "localhost"}
    own |= {"BIGTRAIN_PYTHON": sys.executable, "SLURM_GPUS_ON_NODE": "4", **changes}
    given = {variable: value for variable, value in own.items() if value is not None}
    code, log, calls = run_job(tmp_path, programs, "quickstart", **given)
    assert (code, calls) == (2, []), log
    assert log.startswith("train.sbatch: ")
    assert log.count("\n") == 1
    assert said in log


def test_a_port_that_cannot_be_and_a_list_without_a_node(tmp_path: Path) -> None:
    variables = {"BIGTRAIN_PYTHON": sys.executable, "SLURM_JOB_NUM_NODES": "1"}
    run = ["quickstart", f"output.directory={tmp_path / 'a run'}", "batch.micro_batch_size=1"]
    for programs, more, said in (
        ({}, {"MASTER_PORT": "99999"}, "port 99999 of localhost cannot be used (OverflowError: "),
        ({"scontrol": "exit 1"}, {}, "SLURM_JOB_NODELIST = node[1: scontrol finds no node of it"),
    ):
        own = {**variables, "SLURM_JOB_NODELIST": "node[1", **more}
        code, log, calls = run_job(tmp_path, {**FAKE_SLURM, **programs}, *run, **own)
        assert (code, calls) == (2, []), log
        assert said in log
        assert log.count("\n") == 1
