"""`bigtrain completion` writes scripts by which real shells complete what is typed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import get_args

import pytest

from bigtrain.cli import COMMANDS, main
from bigtrain.commands.completion import Shell, completion_script

# Presses TAB without a terminal: calls the function as bash would, and prints its candidates.
TAB = """
source "$1"; shift
compopt() { [ "$*" = "-o nospace" ] && echo NOSPACE; return 0; }
COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 )); COMPREPLY=()
_bigtrain
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "bash"
    path.write_text(completion_script("bash"))
    return path


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("bigtrain ", set(COMMANDS)),
        ("bigtrain che", {"check", "checkpoints"}),
        ("bigtrain check --config qu", {"quickstart"}),
        ("bigtrain check --config quickstart --show", {"--show"}),
        ("bigtrain check --config quickstart train.s", {"train.steps=", "NOSPACE"}),
        ("bigtrain plan --config quickstart optimizer.muon.n", {
            "optimizer.muon.nesterov=", "optimizer.muon.ns_steps=", "optimizer.muon.ns_dtype=",
            "optimizer.muon.ns_coefficients=", "NOSPACE"}),
        ("bigtrain check --deepspeed_config zero3_o", {"zero3_offload"}),
        ("bigtrain launch slurm --config llama3_7", {"llama3_70b"}),
        ("bigtrain tokenize --encoder g", {"gigatoken"}),
        ("bigtrain export --run RUN", {"RUNS"}),
        ("bigtrain completion f", {"fish"}),
    ],
)  # fmt: skip
def test_bash_completes(script: Path, tmp_path: Path, typed: str, offered: set[str]) -> None:
    (tmp_path / "RUNS").mkdir()
    done = subprocess.run(
        ["bash", "-c", TAB, "bash", script, *typed.split(" ")],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert set(done.stdout.split()) == offered, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("shell", get_args(Shell))
def test_a_shell_reads_its_script(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert "quickstart" in text
    assert "train.steps=" in text
    assert set(COMMANDS) <= set(re.findall(r"[a-z-]+", text))
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed: make test-deps")
    path = tmp_path / "script"
    path.write_text(text)
    subprocess.run([program, "-n", str(path)], check=True)
