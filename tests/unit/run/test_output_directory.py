"""Directories that a run may write to, and those that belong to something else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bigtrain.errors import ConfigError
from bigtrain.python_api.configuring import check
from bigtrain.run.output_directory import check_output
from tests.support.datasets import write_dataset


def refusal(directory: Path) -> str:
    """The text of the one problem of `directory`; empty where it may be a run's."""
    problems = check_output(directory)
    assert len(problems) <= 1
    return "".join(map(str, problems))


def fill(directory: Path, *names: str) -> Path:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            path.mkdir(exist_ok=True)
        else:
            path.write_text("mine")
    return directory


@pytest.mark.parametrize(
    "names",
    [
        (".git/",),
        (".git",),  # a file in worktrees and submodules
        (".git/", "checkpoints/", "metrics.jsonl"),
        (".hg/", "notes.txt"),
    ],
)
def test_a_repository_is_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    assert "is a repository" in refusal(fill(tmp_path / "there", *names))


@pytest.mark.parametrize(
    "names",
    [
        ("config.json", "model.safetensors", "tokenizer.json"),  # a model
        ("shards/manifest.json", "tokenizer/tokenizer.json", "run.yaml"),  # of a project
        ("thesis.pdf",),
        ("empty/",),
        ("checkpoint-500/",),  # of the Trainer
        ("data.log/",),
        ("a.txt", "b.txt"),  # training texts
        ("README.md", "run.yaml"),
        ("corpus.txt", "log.txt"),
        ("a.txt", "checkpoints/epoch-3/weights.bin"),  # of another program
        ("rows.jsonl.gz", "metrics.jsonl"),
    ],
)
def test_files_of_something_else_are_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    directory = fill(tmp_path / "there", *names)
    text = refusal(directory)
    assert f"output.directory = {str(directory)!r}: holds files of something else" in text
    assert names[0].partition("/")[0] in text
    assert f"-> a directory of its own, such as {directory / 'run'}" in text
    assert refusal(directory / "run") == ""


@pytest.mark.parametrize(
    "names",
    [
        (),
        ("slurm-12.out", "run.yaml", "train.log", ".nfs0001"),
        ("generations/", "tokenizer/", "config.json"),  # a launch that was killed at once
        ("checkpoints/step-00000004/state.json", "config.json"),  # fetched
        ("metrics.jsonl", "config.json", "plots/"),  # its checkpoints were removed
        ("requeue",),
        ("requeued",),
        ("generations/", "run_id", "log.txt", "metrics.jsonl", "notes.txt"),
    ],
)
def test_a_run_and_what_is_free_for_one_are_accepted(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    (tmp_path / "there").mkdir()
    assert refusal(fill(tmp_path / "there", *names)) == ""


def test_roots_and_homes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home" / "someone"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    (tmp_path / "link").symlink_to(home)
    assert "is the root of the file system" in refusal(Path("/"))
    assert "is the root of the file system" in refusal(Path("/usr/.."))
    assert "is a home directory" in refusal(home)
    assert "is a home directory" in refusal(tmp_path / "link")
    assert refusal(home / "runs" / "one") == ""


@pytest.mark.parametrize("inputs", [False, True])
def test_check_refuses_it_with_and_without_inputs(tmp_path: Path, *, inputs: bool) -> None:
    directory = fill(tmp_path / "mine", "thesis.pdf")
    data = write_dataset(tmp_path / "shards", vocab_size=4096)
    settings = f"data.path={data}", f"output.directory={directory}", "batch.sequence_length=8"
    with pytest.raises(ConfigError, match=r"holds files of something else than a run: thesis\.pdf"):
        check("quickstart", *settings, inputs=inputs)


@pytest.mark.parametrize("inputs", [False, True])
def test_a_file_is_no_directory(tmp_path: Path, *, inputs: bool) -> None:
    (tmp_path / "run").write_text("")
    data = write_dataset(tmp_path / "shards", vocab_size=4096)
    settings = f"data.path={data}", f"output.directory={tmp_path}/run", "batch.sequence_length=8"
    with pytest.raises(ConfigError, match=f"is a file -> .*, such as {tmp_path}/run$"):
        check("quickstart", *settings, inputs=inputs)


@pytest.mark.parametrize("name", ["checkpoints/", "metrics.jsonl"])
def test_what_a_save_could_not_write_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The tests may run as root, who may write to everything."""
    run = fill(tmp_path / "run", "run_id", "checkpoints/", "metrics.jsonl", "environment.json")
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: run / name != path and access(path, mode))
    assert refusal(run).endswith(
        f"cannot write to {run / name} -> change its owner or permissions, or choose another one"
    )
    assert check_output(run, is_here=False) == []
    (run / name.rstrip("/")).rename(run / "moved")
    assert refusal(run) == ""
