"""``.deepspeed_env``: what DeepSpeed's launcher gives the hosts of a hostfile beyond PYTHON*.

DeepSpeed (0.19.8, launcher/runner.py:610) reads it from ``~`` and then from the working directory,
splits every line at its first ``=``, and crashes on a blank or comment line. What it reads stands
in the command lines of pdsh, ssh or mpirun and of the shells on every host, which ``ps`` shows to
everybody, and in its log: so nothing secret may stand in the file, whatever its mode. `accelerate
launch` with several machines appends its whole environment to it, secrets included, for everybody
to read. Pure but for the file itself.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bigtrain.errors import LaunchError
from bigtrain.system.files import write_new

NAME = ".deepspeed_env"
FORWARDED = (
    *("HF_", "NCCL_", "GLOO_", "OMP_", "MKL_", "KMP_", "TORCH_", "TORCHELASTIC_", "TORCHINDUCTOR_"),
    *("PYTORCH_", "CUDA_", "TRITON_", "DS_", "BIGTRAIN_", "TOKENIZERS_", "WANDB_", "COMET_"),
    *("FI_", "RDMAV_", "IBV_"),  # libfabric and libibverbs: network cards
)
FORWARDED_NAMES = (
    *("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "XDG_CACHE_HOME"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *(name for proxy in ("http", "https", "all", "no") for name in (f"{proxy}_proxy",)),
    *(f"{proxy}_PROXY" for proxy in ("HTTP", "HTTPS", "ALL", "NO")),
)
# The launcher gives each process its devices, and has read the file's name by then.
_OF_THE_LAUNCHER = ("CUDA_VISIBLE_DEVICES", "DS_ENV_FILE")
# DeepSpeed hands these on by itself (runner.py:36), whatever they hold.
_OF_DEEPSPEED = ("MLFLOW", "PYTHON", "MV2", "UCX")
# A dead host sends nothing, so ssh, and the runner with it, would wait for ever without these.
KEEP_ALIVE = "-o ServerAliveInterval=10 -o ServerAliveCountMax=3 -o ConnectTimeout=15"
_SECRET_NAME = re.compile(
    r"(^|_)(TOKEN|KEY|AUTH|COOKIE|PASS|PWD)S?($|_)"
    r"|PASSWORD|PASSWD|PASSPHRASE|SECRET|CREDENTIAL|API_?KEY|(ACCESS|PRIVATE)_?KEY|TOKENS?$",
    re.I,
)
_SECRET_VALUE = re.compile(r"://[^/@\s]*:[^/@\s]+@")  # a URL with a password: proxies, trackers
# Names that hold such a word and no secret.
_HARMLESS = {
    *("TOKENIZERS_PARALLELISM", "HF_HUB_DISABLE_IMPLICIT_TOKEN", "PWD", "OLDPWD"),
    "GOOGLE_APPLICATION_CREDENTIALS",  # a path
}
_HARMLESS_ENDS = ("_PATH", "_FILE", "_DIR")
_WITHOUT_COMMAND_LINES = {
    "HF_TOKEN": "`hf auth login` with HF_HOME on a file system that all hosts share, or "
    "HF_TOKEN_PATH=FILE",
    "WANDB_API_KEY": "`wandb login`, which writes ~/.netrc",
    "COMET_API_KEY": "`comet login`, which writes ~/.comet.config",
    "AWS_SECRET_ACCESS_KEY": "~/.aws/credentials",
}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class HostEnvironment:
    """Variables that hosts are given, and the names of those they are not.

    `secrets` would otherwise have been chosen; `dropped` are all others that are set here;
    `exposed` are secrets that DeepSpeed hands on by itself, on command lines.
    """

    variables: dict[str, str]
    secrets: list[str]
    dropped: list[str]
    exposed: list[str]


def is_secret(name: str, value: str = "") -> bool:
    """Whether a variable holds, by its name or as a URL with a password, what others must not
    read."""
    if _SECRET_VALUE.search(value):
        return True
    harmless = name in _HARMLESS or name.upper().endswith(_HARMLESS_ENDS)
    return not harmless and _SECRET_NAME.search(name) is not None


def select_environment(
    environment: Mapping[str, str], extra: Iterable[str] = ()
) -> HostEnvironment:
    """The variables of `environment` that hosts need, and `extra`, by name.

    Raises LaunchError for one of `extra` that is not set or that is secret, and for values that
    DeepSpeed's reader cannot hold.
    """
    extra = list(extra)
    for name in extra:
        if name not in environment:
            raise LaunchError(f"{name} is not set here -> export it, or do not name it")
        if is_secret(name, environment[name]):
            raise LaunchError(
                f"{name}: holds a secret by its name or value, and DeepSpeed puts what stands in "
                f"{NAME} into its log and into command lines, which ps shows to everybody on every "
                f"host -> {instead_of_command_lines(name)}"
            )
    chosen: dict[str, str] = {}
    secrets, dropped, exposed = [], [], []
    for name, value in sorted(environment.items()):
        secret = is_secret(name, value)
        if secret and name.startswith(_OF_DEEPSPEED):
            exposed.append(name)
        elif name in extra or (_is_forwarded(name) and not secret):
            chosen[name] = value
        elif secret:
            secrets.append(name)
        elif not name.startswith(_OF_DEEPSPEED):
            dropped.append(name)
    for name, value in chosen.items():
        if not _NAME.fullmatch(name) or "\n" in value or "\r" in value:
            # Without the value, which may be a secret.
            rule = f"cannot stand in {NAME}, where a line is NAME=VALUE, for it holds a line end"
            raise LaunchError(f"{name}: {rule} -> unset it here")
    return HostEnvironment(chosen, secrets, dropped, exposed)


def _is_forwarded(name: str) -> bool:
    wanted = name in FORWARDED_NAMES or name.startswith(FORWARDED)
    return wanted and name not in _OF_THE_LAUNCHER


def instead_of_command_lines(name: str) -> str:
    """How the hosts can be given the secret `name` so that no command line holds it."""
    return _WITHOUT_COMMAND_LINES.get(name, "a file of mode 600 that each host reads")


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
    """Write `path` whole, readable by its owner alone. Raises LaunchError as `write_new` does."""
    write_new(path, render_environment(variables), 0o600)


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
    secrets = set()
    for number, line in enumerate(text.splitlines(), 1):
        name, equals, value = line.partition("=")
        if not equals or not _NAME.fullmatch(name.strip()):
            kind = "blank" if not line.strip() else "no NAME=VALUE"
            problems.append(f"{path} line {number}: is {kind}, and DeepSpeed dies of it: delete it")
        if is_secret(name.strip(), value):
            secrets.add(name.strip())
    if secrets:
        readable = f"mode {mode:o} lets others read" if mode & 0o077 else "holds"
        problems.append(
            f"{path}: {readable} {', '.join(sorted(secrets))}, which DeepSpeed puts into its log "
            "and into command lines on every host, for everybody to read: change what has been "
            "used, delete the file (accelerate launch writes such ones), and write one with  "
            "bigtrain hostfile --environment"
        )
    return problems
