"""``slurm/train.sbatch`` filled in for one run: its header, its run, its checkout. Pure.

The script written is the shipped one with other values, so that there is only one to maintain.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bigtrain.errors import LaunchError, Problem
from bigtrain.launchers.node_range import NodesRequest
from bigtrain.system.shipped_files import checkout, slurm_script

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<fields>\d+(?::\d\d){0,2})")
_OPTION = re.compile(r"[a-z][a-z0-9-]*")
_OWNED = {"ntasks-per-node", "requeue", "open-mode", "signal", "nodes", "gpus-per-node", "time"}


@dataclass(frozen=True, kw_only=True)
class SlurmRequest(NodesRequest):
    """A run and what to ask Slurm for.

    `time` in Slurm's own notation; `save_seconds`: before its end the run is told to save;
    `options`: further options of sbatch by name.
    """

    time: str
    save_seconds: int
    options: Mapping[str, str] = field(default_factory=dict)


def render_script(request: SlurmRequest) -> str:
    """The script for `request`. Raises ConfigError with all problems of it and its run."""
    request.check(check_request(request), "the Slurm job")
    header = {
        "nodes": request.nodes,
        "gpus-per-node": str(request.processes_per_node) if request.gpus else None,
        "time": request.time,
        "signal": f"B:USR1@{request.save_seconds}",
        "chdir": shlex.quote(request.directory),
        **request.options,
    }
    text = _with_header(slurm_script("train.sbatch").read_text(encoding="utf-8"), header)
    arguments = shlex.join(request.arguments())
    text = _replaced(text, 'arguments=("$@")', f'arguments=({arguments} "$@")')
    ours = shlex.quote(str(checkout()))
    text = _replaced(
        text, "checkout=${BIGTRAIN_CHECKOUT:-${SLURM_SUBMIT_DIR:-}}", f"checkout={ours}"
    )
    if not request.gpus:
        first = f"BIGTRAIN_PROCESSES_PER_NODE={request.processes_per_node}\n"
        text = _replaced(text, "arguments=(", f"{first}arguments=(")
    if request.setup:
        text = _replaced(text, "arguments=(", "\n".join([*request.setup, "arguments=("]))
    return text


def check_request(request: SlurmRequest) -> list[Problem]:
    """Problems of `request` apart from its run."""
    problems: list[Problem] = []
    seconds = time_seconds(request.time)
    if seconds is None:
        rule = "is no time limit of Slurm"
        remedy = "write minutes, hours:minutes:seconds or days-hours:minutes:seconds"
        problems.append(Problem("--time", request.time, rule, remedy))
    elif request.save_seconds >= seconds:
        rule = f"leaves nothing of the time limit {request.time} = {seconds} s to train in"
        problems.append(
            Problem("--save-seconds", request.save_seconds, rule, "a longer --time, or less")
        )
    for name, value in request.options.items():
        key = f"--sbatch {name}"
        if name in _OWNED:
            rule, remedy = "is set by bigtrain", "use the option of `bigtrain launch slurm`"
            problems.append(Problem(key, value, rule, remedy))
        elif not _OPTION.fullmatch(name) or "\n" in value:
            rule, remedy = "is no option of sbatch", "write --sbatch partition=NAME"
            problems.append(Problem(key, value, rule, remedy))
    return problems


def time_seconds(text: str) -> int | None:
    """Seconds of a time limit in sbatch's notation (man sbatch, --time); None where it is none.

    Without days: minutes, minutes:seconds, hours:minutes:seconds. With days: hours,
    hours:minutes, hours:minutes:seconds.
    """
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    fields = [int(field) for field in match["fields"].split(":")]
    units = [3600, 60, 1] if match["days"] or len(fields) == 3 else [60, 1]
    days = int(match["days"] or 0) * 86400
    return days + sum(value * unit for value, unit in zip(fields, units, strict=False))


def _with_header(text: str, header: Mapping[str, str | None]) -> str:
    """`text` with the #SBATCH lines of `header` set; None removes a line."""
    lines = text.splitlines()
    last = max(i for i, line in enumerate(lines) if line.startswith("#SBATCH"))
    for name, value in header.items():
        wanted = None if value is None else f"#SBATCH --{name}" + (f"={value}" if value else "")
        found = [i for i, line in enumerate(lines) if re.match(rf"#SBATCH --{name}(=|$)", line)]
        if found and wanted is not None:
            lines[found[0]] = wanted
        elif found:
            del lines[found[0]]
            last -= 1
        elif wanted is not None:
            last += 1
            lines.insert(last, wanted)
    return "\n".join(lines) + "\n"


def _replaced(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, f"slurm/train.sbatch has another text than {old!r}"
    return text.replace(old, new)


def sbatch_options(texts: Sequence[str]) -> dict[str, str]:
    """``name=value`` or ``name`` of --sbatch, by name. Raises LaunchError for one given twice."""
    found: dict[str, str] = {}
    for text in texts:
        name, _, value = text.removeprefix("--").partition("=")
        if name in found:
            raise LaunchError(f"--sbatch {name} is given twice: {found[name]!r} and {value!r}")
        found[name] = value
    return found
