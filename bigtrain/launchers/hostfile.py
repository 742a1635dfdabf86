"""DeepSpeed hostfiles: read, check (every problem of a file at once), generate under Slurm.

A line is ``NAME slots=NUMBER``; text after ``#`` is a comment (deepspeed 0.19.8,
launcher/runner.py:229). Pure except for reading the file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bigtrain.errors import LaunchError
from bigtrain.system.slurm import expand_counts, expand_nodelist
from bigtrain.system.text_files import TextFileError, read_text

_LINE = re.compile(r"(\S+)\s+slots=(\d+)")
_NAME = re.compile(r"([A-Za-z0-9._-]+@)?[A-Za-z0-9._-]+")
_SLOTS_WORD = re.compile(r"(\S+)(?:\s+(.*))?")


@dataclass(frozen=True)
class Host:
    """Machine: its name for `ssh`, its number of ranks, and its line in the file."""

    name: str
    slots: int
    line: int


def read_hostfile(
    path: Path, check_hosts: Callable[[list[Host]], list[str]] | None = None
) -> list[Host]:
    """Return the hosts of `path`, in order; `check_hosts` returns further problems of valid hosts.

    Raises LaunchError with all problems.
    """
    try:
        read_text(path)
        text = path.read_bytes().decode("utf-8")  # with line ends, which other programs read, too
    except TextFileError as error:
        raise LaunchError(f"hostfile {path} {error}") from error
    hosts, problems = parse_hostfile(text)
    if check_hosts is not None:
        problems += check_hosts(hosts)
    if problems:
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''} in"
        details = [f"  {detail}" for detail in (*problems, *describe_unequal(hosts))]
        raise LaunchError("\n".join([f"{count} hostfile {path}", *details]))
    return hosts


def parse_hostfile(text: str) -> tuple[list[Host], list[str]]:
    """Return the hosts in `text`, and its problems: line, value, rule and fix."""
    hosts: list[Host] = []
    problems: list[str] = []
    # A byte order mark and line ends of Windows editors, which no reader of hostfiles strips.
    if text.startswith("\ufeff"):
        problems.append(
            "line 1: begins with a byte order mark, which mpirun and DeepSpeed read as a part of "
            "the host's name -> sed -i '1s/^\\xef\\xbb\\xbf//' FILE"
        )
        text = text.removeprefix("\ufeff")
    if "\r" in text:
        line = text[: text.index("\r")].count("\n") + 1
        problems.append(
            f"line {line}: has a Windows line ending (CR LF), and shells and mpirun treat the CR "
            "as part of the last word -> sed -i 's/\\r$//' FILE"
        )
    # The hosts, one in a line.
    for line_number, line_text in enumerate(text.split("\n"), 1):
        entry = line_text.partition("#")[0].strip()
        if not entry:
            continue
        match = _LINE.fullmatch(entry)
        if match is None:
            problems.append(f"line {line_number}: {_describe_defect(entry)}")
            continue
        name, slots_text = match[1], match[2]
        if int(slots_text) < 1:
            rule = "a host has at least one slot"
            problems.append(f"line {line_number}: {name} slots={slots_text}: {rule} -> remove it")
        elif not _NAME.fullmatch(name):
            rule = "is not a host name of letters, digits, dots and hyphens"
            suggestion = re.sub(r"[^A-Za-z0-9._-]", "", name) or "node-1"
            problems.append(
                f"line {line_number}: {name!r}: {rule} -> write {suggestion} slots={slots_text}"
            )
        else:
            hosts.append(Host(name, int(slots_text), line_number))
    # DeepSpeed fails if a host is listed twice, and names no lines.
    first_by_name: dict[str, Host] = {}
    for host in hosts:
        first = first_by_name.setdefault(host.name, host)
        if first is not host:
            slots_hint = ""
            if first.slots != host.slots:
                fewer, more = sorted((first.slots, host.slots))
                slots_hint = f", with slots={fewer} or slots={more}"
            problems.append(
                f"line {host.line}: {host.name} is already listed in line {first.line} -> keep "
                f"one line{slots_hint}"
            )
    if not hosts and not problems:
        problems.append("the file has no hosts -> write lines such as  node-1 slots=8")
    return hosts, problems


def _describe_defect(line: str) -> str:
    """Return the problem of a line that is not ``NAME slots=NUMBER``, with its fix."""
    match = _SLOTS_WORD.fullmatch(line)
    assert match is not None
    name, slots_text = match[1], (match[2] or "").strip()
    if name.startswith("slots="):
        return f"{line!r}: no host before slots -> write its name first: node-1 {name}"
    if not slots_text:
        return f"{name}: no slots -> write the number of its processes: {name} slots=8"
    slots_match = re.fullmatch(r"(?:slots\b)?[\s=:]*(\d+)", slots_text)
    if slots_match is not None:
        return f"{line!r}: is not NAME slots=NUMBER -> write {name} slots={slots_match[1]}"
    if re.search(r"\sslots=\d+$", line):  # several words before the slots
        *name_words, slots_word = line.split()
        return (
            f"{line!r}: a host name has no spaces -> write the name that ssh uses, "
            f"{'-'.join(name_words)} {slots_word} perhaps"
        )
    return f"{line!r}: is not NAME slots=NUMBER -> write {name} slots=N, its number of processes"


def describe_unequal(hosts: Sequence[Host]) -> list[str]:
    """Return a line for every host whose slots differ from the slots of most hosts. Such hosts can
    train together: ranks are numbered in the order of the file."""
    counts = Counter(host.slots for host in hosts)
    usual = max(counts, key=lambda slots: counts[slots], default=0)  # the first on a tie
    different = [host for host in hosts if host.slots != usual]
    lines = [f"{host.name} has slots={host.slots}, most hosts {usual}" for host in different]
    if lines:
        lines.append(
            "unequal hosts are allowed; tensor- and sequence-parallel groups, which take "
            "ranks in this order, may then span two hosts: the run logs this when it starts"
        )
    return lines


def render_hostfile(hosts: Sequence[Host]) -> str:
    """Return the text of a hostfile."""
    return "".join(f"{host.name} slots={host.slots}\n" for host in hosts)


def hosts_of_slurm(environment: Mapping[str, str], slots: int | None = None) -> list[Host]:
    """Return the hosts of a Slurm job, from the variables that sbatch and salloc set.

    A host's slots are `slots` if given, else its GPUs, else its tasks. Raises LaunchError outside a
    job.
    """
    nodelist = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST")
    if not nodelist:
        raise LaunchError(
            "SLURM_JOB_NODELIST is not set, so this is not a Slurm job: run it in sbatch or salloc"
        )
    names = expand_nodelist(nodelist)
    counts = [slots] * len(names) if slots is not None else _slots_of(environment, len(names))
    lines = range(1, len(names) + 1)
    return [Host(*fields) for fields in zip(names, counts, lines, strict=True)]


def _slots_of(environment: Mapping[str, str], num_hosts: int) -> list[int]:
    """Return each host's GPUs, else its tasks, of a Slurm job. Raises LaunchError."""
    per_node = environment.get("SLURM_GPUS_PER_NODE")
    on_node = environment.get("SLURM_GPUS_ON_NODE")
    tasks = environment.get("SLURM_TASKS_PER_NODE")
    if per_node:  # "8", "h100:8", or several kinds: "h100:4,a100:4"
        counts = [part.rpartition(":")[2] for part in per_node.split(",")]
        if all(map(str.isdecimal, counts)):
            return [sum(map(int, counts))] * num_hosts
        raise LaunchError(
            f"SLURM_GPUS_PER_NODE = {per_node!r}: is not a number of GPUs -> --slots N"
        )
    # Slurm reports the GPUs of this node only.
    if on_node and on_node.isdecimal() and int(on_node) > 0:
        return [int(on_node)] * num_hosts
    if tasks:
        try:
            return expand_counts(tasks, num_hosts)
        except LaunchError as error:
            raise LaunchError(f"SLURM_TASKS_PER_NODE = {error} -> --slots N") from error
    raise LaunchError("the Slurm job has neither GPUs nor tasks per node -> give --slots N")
