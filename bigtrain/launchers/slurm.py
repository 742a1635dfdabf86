"""Slurm script of one run: ``slurm/train.sbatch`` with its header, run and checkout. Pure.

The output is the shipped script with other values, so that only one script is maintained.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bigtrain.errors import LaunchError, Problem
from bigtrain.launchers.node_range import NodesRequest, check_spares, control_character, node_range
from bigtrain.system.shipped_files import checkout, slurm_script

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<fields>\d+(?::\d\d){0,2})")
_OPTION = re.compile(r"[a-z][a-z0-9-]*")
_SET_BY_BIGTRAIN = {
    *("ntasks-per-node", "requeue", "open-mode", "signal", "nodes", "gpus-per-node", "time"),
    "no-kill",
}
"""Options of sbatch that a user cannot set."""


@dataclass(frozen=True, kw_only=True)
class SlurmRequest(NodesRequest):
    """Run and its Slurm options.

    `time`: limit in Slurm's notation; `save_seconds`: seconds before that limit at which the run is
    signalled to save; `options`: additional options of sbatch by name. `spares`: nodes beyond
    `nodes` that idle until one is lost; None: the job starts again instead. `ranks`: with spares,
    how ranks are started, a value of `torchrun.RANKS`.
    """

    time: str
    save_seconds: int
    options: Mapping[str, str] = field(default_factory=dict)
    spares: int | None = None
    ranks: str = "auto"


def render_script(request: SlurmRequest) -> str:
    """Return the script for `request`. Raise ConfigError with all problems of the request and its
    run."""
    request.check(check_request(request), "the Slurm job")
    smallest, largest = (number + (request.spares or 0) for number in node_range(request.nodes))
    header = {
        "nodes": f"{smallest}-{largest}" if smallest < largest else str(largest),
        "no-kill": None if request.spares is None else "",
        "gpus-per-node": str(request.processes_per_node) if request.gpus else None,
        "time": request.time,
        "signal": f"B:USR1@{request.save_seconds}",
        "chdir": request.directory,
        **request.options,
    }
    # The shipped script, with this header and these arguments.
    text = _with_header(slurm_script("train.sbatch").read_text(encoding="utf-8"), header)
    arguments = shlex.join(request.arguments())
    text = _replaced(text, 'arguments=("$@")', f'arguments=({arguments} "$@")')
    checkout_path = shlex.quote(str(checkout()))
    text = _replaced(
        text, "checkout=${BIGTRAIN_CHECKOUT:-${SLURM_SUBMIT_DIR:-}}", f"checkout={checkout_path}"
    )
    if not request.gpus:
        variables = f"BIGTRAIN_PROCESSES_PER_NODE={request.processes_per_node}\n"
        text = _replaced(text, "arguments=(", f"{variables}arguments=(")
    if request.spares is not None:
        variables = f"BIGTRAIN_SPARES={request.spares} BIGTRAIN_RANKS={request.ranks}\n"
        text = _replaced(text, "arguments=(", f"{variables}arguments=(")
    if request.setup:
        text = _replaced(text, "arguments=(", "\n".join([*request.setup, "arguments=("]))
    return text


def check_request(request: SlurmRequest) -> list[Problem]:
    """Return problems of `request`, excluding its run."""
    problems: list[Problem] = []
    seconds = time_seconds(request.time)
    if seconds is None:
        rule = "is not a Slurm time limit"
        remedy = "write minutes, hours:minutes:seconds or days-hours:minutes:seconds"
        problems.append(Problem("--time", request.time, rule, remedy))
    elif request.save_seconds >= seconds:
        rule = f"leaves no training time in the time limit {request.time} = {seconds} s"
        problems.append(
            Problem("--save-seconds", request.save_seconds, rule, "set a longer --time, or less")
        )
    problems += check_spares(request.spares)
    for name, value in request.options.items():
        key = f"--sbatch {name}"
        if name in _SET_BY_BIGTRAIN:
            rule, remedy = "is set by bigtrain", "use the option of `bigtrain launch slurm`"
            problems.append(Problem(key, value, rule, remedy))
        elif not _OPTION.fullmatch(name) or control_character(value) is not None:
            rule, remedy = "is not an option of sbatch", "write --sbatch partition=NAME"
            problems.append(Problem(key, value, rule, remedy))
    return problems


def time_seconds(text: str) -> int | None:
    """Return the seconds of a time limit in sbatch's notation (man sbatch, --time); None if
    invalid.

    Without days: minutes, minutes:seconds, hours:minutes:seconds. With days: hours,
    hours:minutes, hours:minutes:seconds.
    """
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    fields = [int(field) for field in match["fields"].split(":")]
    begins_with_hours = match["days"] is not None or len(fields) == 3
    units = [3600, 60, 1] if begins_with_hours else [60, 1]
    day_seconds = int(match["days"] or 0) * 86400
    return day_seconds + sum(value * unit for value, unit in zip(fields, units, strict=False))


def _with_header(text: str, header: Mapping[str, str | None]) -> str:
    """Return `text` with the #SBATCH lines of `header` set, their values quoted; None removes a
    line."""
    lines = text.splitlines()
    last_option = max(i for i, line in enumerate(lines) if line.startswith("#SBATCH"))
    for name, value in header.items():
        header_line = None
        if value is not None:
            assert control_character(value) is None, (name, value)
            header_line = f"#SBATCH --{name}" + (f"={shlex.quote(value)}" if value else "")
        option_lines = [
            i for i, line in enumerate(lines) if re.match(rf"#SBATCH --{name}(=|$)", line)
        ]
        if option_lines and header_line is not None:
            lines[option_lines[0]] = header_line
        elif option_lines:
            del lines[option_lines[0]]
            last_option -= 1
        elif header_line is not None:
            last_option += 1
            lines.insert(last_option, header_line)
    return "\n".join(lines) + "\n"


def _replaced(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, f"slurm/train.sbatch must contain {old!r} once"
    return text.replace(old, new)


def sbatch_options(texts: Sequence[str]) -> dict[str, str]:
    """Return --sbatch options (``name=value`` or ``name``) by name. Raise LaunchError for a
    repeated option."""
    options: dict[str, str] = {}
    for text in texts:
        name, _, value = text.removeprefix("--").partition("=")
        if name in options:
            raise LaunchError(f"--sbatch {name} is given twice: {options[name]!r} and {value!r}")
        options[name] = value
    return options
