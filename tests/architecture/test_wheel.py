"""The installed package works without the checkout: commands, recipes, DeepSpeed JSONs, scripts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.datasets import write_dataset
from tests.support.worlds import ROOT


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The contents of a wheel, built without network from a copy of what git would take."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if name.startswith(("bigtrain/", "ds_configs/", "slurm/")) or "/" not in name:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", *options, str(source)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    shutil.rmtree(source)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


@pytest.mark.slow
def test_commands_of_a_wheel_need_no_checkout(installed: Path, tmp_path: Path) -> None:
    """In a folder without one: what is written and shown names the installed files only."""
    write_dataset(tmp_path / "shards", vocab_size=50)

    def bigtrain(*words: str) -> str:
        # Not the checkout, which an editable installation would put on the path.
        code = (
            f"import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f)]; "
            f"sys.path.insert(0, {str(installed)!r}); sys.argv = ['bigtrain', *{list(words)!r}]; "
            "from bigtrain.cli import program; program()"
        )
        environment = {**os.environ, "PYTHONPATH": ""}
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path, env=environment, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert str(ROOT) not in done.stdout.replace(f"{ROOT}/.venv", "")
        return done.stdout

    given = ["--new-model", "quickstart", "--data", "shards", "--global-batch-size", "16"]
    bigtrain("init", *given, "--output", "run.yaml")
    assert str(ROOT) not in (tmp_path / "run.yaml").read_text()
    run = ["--config", "run.yaml"]
    shown = bigtrain("check", *run, "--world-size", "2", "--deepspeed_config", "zero3")
    program = installed / "bigtrain/train.py"
    assert f"{program} --config run.yaml --deepspeed_config zero3" in shown
    assert program.is_file()
    assert "predicted: " in bigtrain(
        "check", "--config", "llama3_8b", "data.path=later", "--world-size", "8"
    )
    json.loads(bigtrain("schema"))
    bigtrain("launch", "slurm", *run, "--nodes", "2", "--time", "1:00:00", "--output", "x")
    assert (tmp_path / "x").is_file()
    assert "start" in bigtrain()
