"""`bigtrain check --inputs` refuses what the run itself refuses of its data and its model."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import yaml

from bigtrain.cli import main
from bigtrain.errors import ConfigError
from bigtrain.run.preflight import inspect_inputs
from bigtrain.settings.resolve import resolve_run_files
from bigtrain.system.files import cannot_be_written, why_not_creatable
from tests.support.datasets import write_dataset
from tests.support.run_trees import run_tree
from tests.support.small_checkpoint import write_small_checkpoint


def run_yaml(place: Path, shards: Path, model: dict[str, Any], **sections: Any) -> str:
    path, output = place / "run.yaml", {"directory": str(place / "run")}
    usual = {"data": {"path": str(shards)}, "output": output}
    tree = run_tree(model={"config": {"vocab_size": 50, **model}}, **{**usual, **sections})
    path.write_text(yaml.safe_dump(tree))
    return str(path)


REFUSED = {
    "no data": ({"model_type": "llama"}, {"data": {"path": "nowhere"}}),
    "no such bias": ({"model_type": "llama"}, {"moe": {"bias_update_rate": 1e-3}}),
    "another vocabulary": ({"model_type": "llama", "vocab_size": 40}, {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_refuses_what_the_run_refuses(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_dataset(tmp_path / "shards", vocab_size=50)
    model, sections = REFUSED[name]
    path = run_yaml(tmp_path, data, model, **sections)
    # The manifest has the vocabulary, and is read without --inputs.
    assert main(["check", "--config", path]) == (2 if name == "another vocabulary" else 0)
    capsys.readouterr()
    assert main(["check", "--config", path, "--inputs"]) == 2
    said = capsys.readouterr()
    with pytest.raises(ConfigError) as caught:
        inspect_inputs(resolve_run_files(path, [], 1))
    for problem in caught.value.problems:
        assert str(problem) in said.err
    assert said.out == ""
    assert not (tmp_path / "run").exists()


def test_data_without_its_tokenizer_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run would copy it once its processes have started."""
    data = write_dataset(tmp_path / "shards", vocab_size=50)
    path = run_yaml(tmp_path, data, {"model_type": "llama"})
    assert main(["check", "--config", path, "--inputs"]) == 0
    assert "data: 1 opened, model: llama" in capsys.readouterr().out
    (data / "tokenizer").rmdir()
    assert main(["check", "--config", path, "--inputs"]) == 2
    assert "has no directory tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--inputs"]])
def test_a_checkpoint_of_other_settings_is_refused_as_the_run_refuses_it(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_dataset(tmp_path / "shards", vocab_size=50)
    path = run_yaml(tmp_path, data, {"model_type": "llama"})
    there = yaml.safe_load(Path(path).read_text())
    write_small_checkpoint(tmp_path / "run", 1, {**there, "optimizer": {"lr": 2e-3}})
    assert main(["check", "--config", path, *more]) == 2
    assert "optimizer.lr: 0.002 there, 0.001 now" in capsys.readouterr().err
    assert main(["check", "--config", path, "optimizer.lr=2e-3"]) == 0
    assert "resumes from" in capsys.readouterr().out


def test_a_directory_that_takes_no_files_is_named_with_its_reason() -> None:
    """The permissions of /proc allow root everything."""
    reason = why_not_creatable(Path("/proc/nope"))
    assert reason is not None
    assert reason.startswith("/proc takes no files: ") or "cannot write to /proc" in reason
    error = FileNotFoundError(errno.ENOENT, "No such file or directory", "/proc/nope")
    remedy = "make room, or choose another output.directory"
    assert cannot_be_written(Path("/proc/nope"), error, remedy).endswith(
        "-> choose another output.directory"
    )
    full = OSError(errno.ENOSPC, "No space left on device")
    assert cannot_be_written(Path("x"), full, remedy).endswith(f"-> {remedy}")
