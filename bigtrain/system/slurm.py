"""Slurm's variables: lists of nodes, and the ranks of tasks that srun starts without a launcher.

`srun -n 8 python bigtrain/train.py` starts every rank itself. The number of tasks is the
step's, SLURM_STEP_NUM_TASKS, which only srun sets: a batch script has SLURM_NTASKS and SLURM_PROCID
too, and runs one process (man srun, "OUTPUT ENVIRONMENT VARIABLES").
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from bigtrain.errors import LaunchError

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_MOST_HOSTS = 65536  # of one expression: more is a typing error that would fill the memory
# Ports of a step: outside those that Linux gives to outgoing connections (32768 to 60999).
_FIRST_PORT, _NUM_PORTS = 12000, 20000


def has_srun_tasks(environment: Mapping[str, str]) -> bool:
    """Return whether srun started this process as one of several tasks."""
    number = environment.get("SLURM_STEP_NUM_TASKS", "")
    return "SLURM_PROCID" in environment and number.isdecimal() and int(number) > 1


def srun_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """Return RANK, WORLD_SIZE and LOCAL_RANK of a task of srun; see `has_srun_tasks`."""
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment.get("SLURM_LOCALID", ""),
    }


def srun_tasks_here(environment: Mapping[str, str]) -> int | None:
    """Return the number of this step's tasks on this node; None if it is unknown."""
    node = environment.get("SLURM_NODEID", "")
    num_nodes = environment.get("SLURM_STEP_NUM_NODES", "")
    if not (node.isdecimal() and num_nodes.isdecimal() and int(node) < int(num_nodes)):
        return None
    try:
        task_counts = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
        return expand_counts(task_counts, int(num_nodes))[int(node)]
    except LaunchError:
        return None


def srun_rendezvous(environment: Mapping[str, str]) -> dict[str, str]:
    """Return MASTER_ADDR and MASTER_PORT for the tasks of a step: its first node, and a port that
    follows from the job and the step, so that all tasks agree without a message and two steps on
    one node differ. Raises LaunchError if Slurm does not name the nodes."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    if not nodes:
        raise LaunchError(
            "srun started several tasks, but neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST is "
            "set, so they cannot connect to each other -> export MASTER_ADDR and MASTER_PORT"
        )
    job, step = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_STEP_ID", "")
    job_number, step_number = (int(text) if text.isdecimal() else 0 for text in (job, step))
    number = job_number * 16 + step_number  # 16 steps of a job, then the ports of the next job
    return {
        "MASTER_ADDR": expand_nodelist(nodes)[0],
        "MASTER_PORT": str(_FIRST_PORT + number % _NUM_PORTS),
    }


def expand_counts(text: str, num_hosts: int) -> list[int]:
    """Expand "2(x3),1" to 2, 2, 2, 1 (man sbatch, SLURM_TASKS_PER_NODE). Raises LaunchError unless
    it holds `num_hosts` counts."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise LaunchError(f"{text!r}: cannot be parsed")
        counts += [int(match[1])] * int(match[2] or 1)
    if len(counts) != num_hosts:
        raise LaunchError(f"{text!r} is not for {num_hosts} nodes")
    return counts


def expand_nodelist(text: str) -> list[str]:
    """Expand names in Slurm's notation: ``n[1-2,05-07],login,r[1-2]c[0-3]`` (man scontrol,
    hostlist).

    Raises LaunchError for an invalid list.
    """
    names: list[str] = []
    for part in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", text):
        names += _expand_name(part, text)
        if len(names) > _MOST_HOSTS:
            raise LaunchError(f"node list {text!r} names more than {_MOST_HOSTS} hosts")
    if not names or text.count("[") != text.count("]"):
        raise LaunchError(f"node list {text!r} cannot be parsed: see  scontrol show hostnames")
    return names


def _expand_name(pattern: str, text: str) -> list[str]:
    """Return the names of a pattern such as ``r[1-2]c[0-3]`` of the node list `text`."""
    before, bracket, bracketed = pattern.partition("[")
    if not bracket:
        return [before]
    ranges, _, after = bracketed.partition("]")
    ends = _expand_name(after, text)
    names: list[str] = []
    for range_text in ranges.split(","):
        match = _RANGE.fullmatch(range_text)
        first, last = 1, 0
        if match is not None:
            first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first > _MOST_HOSTS:
            raise LaunchError(f"node list {text!r}: {range_text!r} is not a range of numbers")
        num_digits = len(range_text.partition("-")[0])  # 05-07: names have leading zeros
        for number in range(first, last + 1):
            names += [f"{before}{str(number).zfill(num_digits)}{end}" for end in ends]
    return names
