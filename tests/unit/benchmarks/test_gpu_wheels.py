"""What is carried to a GPU machine without a network, and how the check starts from it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

from tools import gpu_check, gpu_wheels


def test_every_carried_package_has_a_version() -> None:
    for name in gpu_wheels.CARRIED:
        assert gpu_wheels.version_of(name)[0].isdigit()
    with pytest.raises(SystemExit, match="no version of nothing-like-it"):
        gpu_wheels.version_of("nothing-like-it")


def test_every_dependency_is_carried_or_there_or_not_needed() -> None:
    project = tomllib.loads((gpu_wheels.ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[<>=; \[]", line)[0].lower() for line in project["dependencies"]}
    carried, spared = set(gpu_wheels.CARRIED), set(gpu_wheels.NOT_NEEDED)
    assert names == (names & carried) | gpu_wheels.THERE | spared
    assert not carried & spared
    assert not (carried | spared) & gpu_wheels.THERE


@pytest.mark.slow
def test_all_parts_are_imported_without_what_is_not_needed() -> None:
    program = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({sorted(gpu_wheels.NOT_NEEDED)!r}))\n"
        "import benchmarks.gpu_check.parts\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=gpu_wheels.ROOT, check=True)


def test_a_wheel_for_one_machine_is_told_by_its_name() -> None:
    assert gpu_wheels.is_neutral("deepspeed-0.19.8-py3-none-any.whl")
    assert not gpu_wheels.is_neutral("deepspeed-0.19.8-cp312-cp312-linux_x86_64.whl")


def test_the_checkout_leaves_room_for_the_wheels() -> None:
    assert 1_000_000 < gpu_wheels.tree_bytes() < gpu_wheels.LIMIT_BYTES // 2


def wheel(folder: Path, version: str) -> Path:
    """A package of one module, as a wheel."""
    path = folder / f"carried_thing-{version}-py3-none-any.whl"
    record = f"carried_thing-{version}.dist-info"
    with ZipFile(path, "w") as file:
        file.writestr("carried_thing.py", f"VERSION = '{version}'\n")
        file.writestr(f"{record}/METADATA", f"Name: carried-thing\nVersion: {version}\n")
        file.writestr(f"{record}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        file.writestr(f"{record}/RECORD", "")
    return path


def test_wheels_are_installed_once_into_a_folder_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    first = wheel(tmp_path / "wheels", "1.0")
    packages = gpu_check.install([first], tmp_path)
    environment = gpu_check.environment_for(packages)
    command = [sys.executable, "-c", "import carried_thing; print(carried_thing.VERSION)"]
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert completed.stdout.strip() == "1.0"
    first.write_bytes(b"")  # nobody reads it again
    assert gpu_check.install([first], tmp_path) == packages
    other = gpu_check.install([wheel(tmp_path / "wheels", "2.0")], tmp_path)
    assert other != packages
