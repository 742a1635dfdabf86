"""``.deepspeed_env``: what DeepSpeed's launcher gives the hosts of a hostfile beyond PYTHON*.

DeepSpeed (0.19.8, launcher/runner.py:610) reads it from ``~`` and then from the working directory,
splits every line at its first ``=``, and crashes on a blank or comment line. `accelerate launch`
with several machines appends its whole environment to it, secrets included, for everybody to read.
Pure but for the file itself.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

from bigtrain.errors import LaunchError

NAME = ".deepspeed_env"
FORWARDED = ("HF_", "NCCL_", "GLOO_", "OMP_", "TORCH_", "TORCHELASTIC_", "TOKENIZERS_", "CUDA_HOME")
FORWARDED_NAMES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
# A dead host sends nothing, so ssh, and the runner with it, would wait for ever without these.
KEEP_ALIVE = "-o ServerAliveInterval=10 -o ServerAliveCountMax=3 -o ConnectTimeout=15"
_SECRET = re.compile(
    r"(^|_)(TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|AUTH|COOKIE)S?($|_)", re.I
)
# Names that hold such a word and no secret.
_HARMLESS = {"TOKENIZERS_PARALLELISM", "HF_TOKEN_PATH", "HF_HUB_DISABLE_IMPLICIT_TOKEN"}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def is_secret(name: str) -> bool:
    """Whether a variable of this name holds, by its name, what others must not read."""
    return name not in _HARMLESS and _SECRET.search(name) is not None


def select_environment(
    environment: Mapping[str, str], extra: Iterable[str] = ()
) -> tuple[dict[str, str], list[str]]:
    """The variables that hosts need, by name, and the names of secrets that were left out.

    `extra` names further variables, also secret ones. Raises LaunchError for one that is not set,
    and for values that DeepSpeed's reader cannot hold.
    """
    chosen: dict[str, str] = {}
    withheld = []
    extra = list(extra)
    for name in extra:
        if name not in environment:
            raise LaunchError(f"{name} is not set here -> export it, or do not name it")
    for name in sorted(environment):
        if name in extra:
            chosen[name] = environment[name]
        elif name in FORWARDED_NAMES or name.startswith(FORWARDED):
            if is_secret(name):
                withheld.append(name)
            else:
                chosen[name] = environment[name]
    for name, value in chosen.items():
        if not _NAME.fullmatch(name) or "\n" in value or "\r" in value:
            # Without the value, which may be a secret.
            rule = f"cannot stand in {NAME}, where a line is NAME=VALUE, for it holds a line end"
            raise LaunchError(f"{name}: {rule} -> unset it here")
    return chosen, withheld


def render_environment(variables: Mapping[str, str]) -> str:
    """The text of the file: no comment and no blank line, either of which DeepSpeed dies of.

    Values are quoted where a shell needs it, because pdsh hands ``export NAME=VALUE`` to one
    (multinode_runner.py:104). DeepSpeed's other launchers would hand the quotes on.
    """
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in variables.items())


def quoted_names(variables: Mapping[str, str]) -> list[str]:
    """The variables whose values only pdsh hands on as they are."""
    return [name for name, value in variables.items() if shlex.quote(value) != value]


def write_environment(path: Path, variables: Mapping[str, str]) -> None:
    """Write `path` whole, readable by its owner alone. Raises LaunchError where that fails."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(render_environment(variables))
        temporary.rename(path)
    except OSError as error:
        raise LaunchError(f"cannot write {path}: {error.strerror}") from error


def inspect_environment_file(path: Path) -> list[str]:
    """What is wrong with `path`, each with its remedy; nothing where it does not exist.

    Names secrets, never their values.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
        mode = path.stat().st_mode & 0o777
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"{path}: cannot be read: {error.strerror}"]
    problems = []
    names = []
    for number, line in enumerate(text.splitlines(), 1):
        name, equals, _ = line.partition("=")
        if not equals or not _NAME.fullmatch(name.strip()):
            kind = "blank" if not line.strip() else "no NAME=VALUE"
            problems.append(f"{path} line {number}: is {kind}, and DeepSpeed dies of it: delete it")
        names.append(name.strip())
    found = sorted({name for name in names if is_secret(name)})
    if found and mode & 0o077:
        problems.append(
            f"{path}: mode {mode:o} lets others read {', '.join(found)}: change these secrets, "
            "delete the file (accelerate launch writes such ones), and write one with  bigtrain "
            "hostfile --environment"
        )
    return problems
