"""``.deepspeed_env``: the environment variables that DeepSpeed's launcher sends to other hosts.

DeepSpeed (0.19.8, launcher/runner.py:610) reads it from ``~`` and then from the working directory,
splits every line at its first ``=``, and crashes on a blank or comment line. It writes the
variables into its log and into the command lines of pdsh, ssh or mpirun and of the shells on every
host, which ``ps`` shows to all users: so the file must not contain secrets, regardless of its mode.
`accelerate launch` with several machines appends its entire environment to it, secrets included,
readable by all users. Pure except for the file itself.
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
    *("http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
)
# The launcher sets these itself: each rank's devices, and the name of the file it read.
_LAUNCHER_NAMES = ("CUDA_VISIBLE_DEVICES", "DS_ENV_FILE")
# DeepSpeed forwards these by itself (runner.py:36), secrets or not.
_DEEPSPEED_PREFIXES = ("MLFLOW", "PYTHON", "MV2", "UCX")
# Without these options ssh, and so DeepSpeed's runner, would wait for a dead host forever.
KEEP_ALIVE = "-o ServerAliveInterval=10 -o ServerAliveCountMax=3 -o ConnectTimeout=15"
_SECRET_NAME = re.compile(
    r"(^|_)(TOKEN|KEY|AUTH|COOKIE|PASS|PWD)S?($|_)"
    r"|PASSWORD|PASSWD|PASSPHRASE|SECRET|CREDENTIAL|API_?KEY|(ACCESS|PRIVATE)_?KEY|TOKENS?$"
    r"|WEBHOOK|OTLP_(\w+_)?HEADERS$",
    re.I,
)
_SECRET_VALUE = re.compile(r"://[^/@\s]*:[^/@\s]+@")  # a URL with a password: proxies, trackers
# Names that contain a word of `_SECRET_NAME` but are not secret.
_HARMLESS = {
    *("TOKENIZERS_PARALLELISM", "HF_HUB_DISABLE_IMPLICIT_TOKEN", "PWD", "OLDPWD"),
    "GOOGLE_APPLICATION_CREDENTIALS",  # a path
}
_HARMLESS_ENDS = ("_PATH", "_FILE", "_DIR")
_SAFE_WAYS = {
    "HF_TOKEN": "`hf auth login` with HF_HOME on a file system that all hosts share, or "
    "HF_TOKEN_PATH=FILE",
    "WANDB_API_KEY": "`wandb login`, which writes ~/.netrc",
    "COMET_API_KEY": "`comet login`, which writes ~/.comet.config",
    "AWS_SECRET_ACCESS_KEY": "~/.aws/credentials",
}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class HostEnvironment:
    """Variables that are sent to hosts, and the names of variables that are not.

    `secrets` would be sent if they were not secret; `exposed` are secrets that DeepSpeed forwards
    by itself, on command lines; `dropped` are all further variables that are set here.
    """

    variables: dict[str, str]
    secrets: list[str]
    dropped: list[str]
    exposed: list[str]


def is_secret(name: str, value: str = "") -> bool:
    """Return whether a variable is a secret: by its name, or because its value is a URL with a
    password."""
    if _SECRET_VALUE.search(value):
        return True
    is_harmless = name in _HARMLESS or name.upper().endswith(_HARMLESS_ENDS)
    return _SECRET_NAME.search(name) is not None and not is_harmless


def select_environment(
    environment: Mapping[str, str], extra: Iterable[str] = ()
) -> HostEnvironment:
    """Return the variables of `environment` that hosts need, and `extra`, by name.

    Raises LaunchError for a variable of `extra` that is unset or secret, and for values that
    DeepSpeed's reader cannot parse.
    """
    extra = list(extra)
    for name in extra:
        if name not in environment:
            raise LaunchError(f"{name} is not set here -> export it, or remove it from the list")
        if is_secret(name, environment[name]):
            raise LaunchError(
                f"{name}: is a secret by its name or value, and DeepSpeed writes the contents of "
                f"{NAME} into its log and into command lines, which ps shows to all users on every "
                f"host -> {instead_of_command_lines(name)}"
            )
    # Secrets are never written. DeepSpeed forwards some variables itself: secrets are exposed then.
    variables: dict[str, str] = {}
    secrets, dropped, exposed = [], [], []
    for name, value in sorted(environment.items()):
        secret = is_secret(name, value)
        is_forwarded = name in FORWARDED_NAMES or name.startswith(FORWARDED)
        is_forwarded = is_forwarded and name not in _LAUNCHER_NAMES
        is_forwarded_by_deepspeed = name.startswith(_DEEPSPEED_PREFIXES)
        if secret and is_forwarded_by_deepspeed:
            exposed.append(name)
        elif name in extra or (is_forwarded and not secret):
            variables[name] = value
        elif secret:
            secrets.append(name)
        elif not is_forwarded_by_deepspeed:
            dropped.append(name)
    for name, value in variables.items():
        if not _NAME.fullmatch(name) or "\n" in value or "\r" in value:
            # Without the value, which may be a secret.
            rule = (
                f"cannot be written to {NAME}, where a line is NAME=VALUE: it contains a line break"
            )
            raise LaunchError(f"{name}: {rule} -> unset it here")
    return HostEnvironment(variables, secrets, dropped, exposed)


def instead_of_command_lines(name: str) -> str:
    """Return a way to pass the secret `name` to hosts without a command line."""
    return _SAFE_WAYS.get(name, "a file of mode 600 that each host reads")


def render_environment(variables: Mapping[str, str]) -> str:
    """Return the text of the file, without comments and blank lines, on which DeepSpeed crashes.

    Values are quoted for the shell, because pdsh runs ``export NAME=VALUE`` in one
    (multinode_runner.py:104). DeepSpeed's other launchers make the quotes a part of the value.
    """
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in variables.items())


def write_environment(path: Path, variables: Mapping[str, str]) -> None:
    """Write `path`, readable by its owner only. Raises LaunchError as `write_new` does."""
    write_new(path, render_environment(variables), 0o600)


def inspect_environment_file(path: Path) -> list[str]:
    """Return the problems of `path`, each with its fix; empty if it does not exist.

    Names secrets, never their values.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
        mode = path.stat().st_mode & 0o777
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"{path}: cannot be read: {error.strerror}"]
    # DeepSpeed splits each line at its first equals sign, and exports what it finds.
    problems = []
    secrets = set()
    for number, line in enumerate(text.splitlines(), 1):
        name, equals, value = line.partition("=")
        if not equals or not _NAME.fullmatch(name.strip()):
            defect = "blank" if not line.strip() else "not NAME=VALUE"
            problems.append(
                f"{path} line {number}: is {defect}, and DeepSpeed crashes on it: delete it"
            )
        if is_secret(name.strip(), value):
            secrets.add(name.strip())
    if secrets:
        readable = f"mode {mode:o} lets others read" if mode & 0o077 else "contains"
        problems.append(
            f"{path}: {readable} {', '.join(sorted(secrets))}, which DeepSpeed writes into its log "
            "and into command lines on every host, readable by all users: replace the secrets that "
            "were used, delete the file (accelerate launch writes such ones), and write one with  "
            "bigtrain hostfile --environment"
        )
    return problems
