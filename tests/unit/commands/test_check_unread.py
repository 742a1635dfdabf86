"""`bigtrain check` reports what it could not read, and refuses what the run refuses of a model's
files and of its parallel plan, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers.utils as names
import yaml
from huggingface_hub import try_to_load_from_cache
from transformers import LlamaConfig

from bigtrain.cli import main
from bigtrain.errors import ConfigError, ModelError
from bigtrain.models.weights import weight_paths
from bigtrain.models.weights.import_hf import find_weights
from bigtrain.run.named_files import unread_files
from bigtrain.settings.hf_config_keys import inspect_configuration
from bigtrain.settings.loading import parse_run_config
from bigtrain.settings.run_config import ModelSection
from bigtrain.system.hub_cache import cached_hub_file, is_hub_name
from tests.support.datasets import write_dataset
from tests.support.run_trees import run_tree
from tests.support.small_checkpoint import write_small_checkpoint

LLAMA = {
    "model_type": "llama", "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32,
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def cached_model(folder: Path, name: str, config: dict[str, Any]) -> Path:
    """Write a model's configuration as the Hub's library keeps it."""
    place = folder / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = place / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs/main").write_text("0123abcd")
    path = snapshot / "config.json"
    path.write_text(json.dumps(config))
    return path


def check(*settings: str) -> int:
    return main(["check", "--config", "quickstart", *settings])


def test_an_output_directory_that_cannot_be_made_here_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Elsewhere it may be possible; --inputs and the run refuse it."""
    assert check("output.directory=/proc/bigtrain/run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "not written: output.directory = /proc/bigtrain/run: /proc takes no files" in "\n".join(
        lines
    )
    assert any(line.startswith("this run can start where these can be used") for line in lines)


def test_what_is_not_here_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names that the Hub may have; the start is for where they can be read."""
    model = "model={path: owner/name}"
    assert check(model, "data.path=texts/shards", "output.directory=run") == 0
    *_, data, _, verdict, _ = capsys.readouterr().out.splitlines()
    assert data == "not read: data.path = texts/shards: does not exist here"
    assert verdict == "this run can start where these can be used; next:"
    write_dataset(folder / "shards", vocab_size=4096)
    assert check("data.path=shards", "output.directory=run") == 0
    assert "this run can start; next:" in capsys.readouterr().out


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"path": "owner/name"}},
        {"model": {"config": "owner/name"}},
        {"data": {"sources": [{"path": "here", "weight": 1}, {"path": "owner/name", "weight": 1}]}},
        {"evaluation": {"every_steps": 1, "held_out": [{"name": "a", "path": "owner/name"}]}},
        {"checkpoint": {"initialize_from": "owner/name"}},
        {"objective": {"type": "distillation", "teacher": "owner/name"}},
        {"objective": {"type": "distillation", "teacher_model": "owner/name"}},
    ],
)
def test_every_file_that_a_setting_names_is_looked_for(
    folder: Path, sections: dict[str, Any]
) -> None:
    (folder / "here").mkdir()
    (folder / "here/manifest.json").touch()
    tree = run_tree(**{"model": {"config": LLAMA}, "data": {"path": "here"}, **sections})
    [line] = unread_files(parse_run_config(tree))
    ((section, value),) = sections.items()
    key = next(name for name, text in value.items() if "owner/name" in str(text))
    assert line.startswith(f"not read: {section}.{key}")
    assert "= owner/name: " in line
    (folder / "owner/name").mkdir(parents=True)
    (folder / "owner/name/manifest.json").touch()
    assert unread_files(parse_run_config(tree)) == []


@pytest.mark.parametrize(
    "name", ["missing/", "a/b/c", "./x", "/no/such", "~/x", "..", "a--b", "x y", "runs/a/hf", ""]
)
def test_what_no_name_of_the_hub_is_like_is_a_path(name: str) -> None:
    assert not is_hub_name(name)
    if name:
        assert check(f"model={{path: '{name}'}}") == 2


@pytest.mark.parametrize("name", ["gpt2", "owner/name", "Qwen/Qwen2.5-0.5B", "_a/b_c.d"])
def test_names_of_the_hub(name: str) -> None:
    assert is_hub_name(name)


def test_a_model_in_the_cache_of_the_hub_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where huggingface_hub looks, by each of its variables."""
    path = cached_model(folder, "owner/name", LLAMA)
    assert try_to_load_from_cache("owner/name", "config.json", folder / "hub") == str(path)
    assert cached_hub_file("owner/name", "config.json") == path
    assert cached_hub_file("owner/name", "other.json") is None
    assert cached_hub_file("owner/other", "config.json") is None
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", str(folder))
    assert cached_hub_file("owner/name", "config.json") == path
    dimensions, problems = inspect_configuration(ModelSection(path="owner/name"))
    assert (dimensions.cut_heads, dimensions.cut_key_heads, problems) == (4, 2, [])
    tensor = ["--world-size", "3", "parallel.tensor=3", "batch.micro_batch_size=1"]
    assert check("model={path: owner/name}", *tensor) == 2
    assert "num_attention_heads = 4 and num_key_value_heads = 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], "holds none of model.safetensors, model.safetensors.index.json"),
        (["pytorch_model.bin"], "pytorch_model.bin is a pickle, which can run code"),
        (["pytorch_model.bin.index.json"], "is a pickle"),
        (["model.safetensors.index.json"], "names the file a.safetensors, which is missing"),
        (["model.safetensors", "model.safetensors.index.json"], "names 1 other files"),
        (["weights.bin"], "weights.bin is a pickle"),
    ],
)
def test_weights_are_refused_as_the_run_refuses_them(
    folder: Path, capsys: pytest.CaptureFixture[str], files: list[str], words: str
) -> None:
    listed = {"transformers_weights": "weights.bin"} if files == ["weights.bin"] else {}
    (folder / "base").mkdir()
    (folder / "base/config.json").write_text(json.dumps({**LLAMA, **listed}))
    for name in files:
        text = json.dumps({"weight_map": {"x": "a.safetensors"}}) if "index" in name else ""
        (folder / "base" / name).write_text(text)
    with pytest.raises(ModelError) as caught:
        find_weights("base", LlamaConfig(**LLAMA, **listed))
    assert words in str(caught.value)
    assert check("model={path: base}") == 2
    assert capsys.readouterr().err == f"bigtrain check: {caught.value}\n"
    teacher = ["objective={type: distillation, teacher_model: base}", f"model.config={LLAMA}"]
    assert check(*teacher) == 2
    assert "objective.teacher_model = 'base': " in capsys.readouterr().err
    # A run that resumes does not read the base.
    (folder / "run/checkpoints/step-00000002").mkdir(parents=True)
    config = parse_run_config(run_tree(model={"path": "base"}, output={"directory": "run"}))
    from bigtrain.run.named_files import check_weight_files

    check_weight_files(config)


def test_names_of_weights_are_those_of_transformers() -> None:
    ours = (weight_paths.SAFE_WEIGHTS, weight_paths.SAFE_INDEX, *weight_paths.PICKLED_WEIGHTS)
    assert ours == (
        names.SAFE_WEIGHTS_NAME,
        names.SAFE_WEIGHTS_INDEX_NAME,
        names.WEIGHTS_NAME,
        names.WEIGHTS_INDEX_NAME,
    )


@pytest.mark.parametrize("model_type", ["gpt2", "opt", "falcon", "bloom", "rwkv"])
def test_a_model_without_a_tensor_parallel_plan_is_refused(
    model_type: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before torch is imported; a class of the user may have a plan of its own."""
    config = {"model_type": model_type}
    tensor = ["--world-size", "2", "parallel.tensor=2", "batch.micro_batch_size=1"]
    assert check(f"model={{config: {config}}}", *tensor) == 2
    assert "no tensor-parallel plan" in capsys.readouterr().err
    dimensions, _ = inspect_configuration(ModelSection(config=config, type="mine:Model"))
    assert dimensions.has_tensor_plan is None
    assert inspect_configuration(ModelSection(config=LLAMA))[0].has_tensor_plan


def test_of_a_run_that_exists_no_torch_is_imported(folder: Path) -> None:
    write_dataset(folder / "shards", vocab_size=50)
    tree = run_tree(
        model={"config": LLAMA}, data={"path": "shards"}, output={"directory": str(folder / "run")}
    )
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    write_small_checkpoint(folder / "run", 1, tree)
    code = (
        "import sys; from bigtrain.cli import main\n"
        "code = main(['check', '--config', 'run.yaml'])\n"
        "print(code, [n for n in ('torch', 'transformers', 'deepspeed') if n in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
    )
    assert "resumes from" in result.stdout
    assert result.stdout.splitlines()[-1] == "0 []"


def test_settings_with_problems_are_one_error(folder: Path) -> None:
    """Files of the base next to a directory that cannot be the run's."""
    (folder / "base").mkdir()
    (folder / "base/config.json").write_text(json.dumps(LLAMA))
    (folder / "base/model.safetensors").touch()
    (folder / "base/adapter_config.json").write_text("{}")
    (folder / "other").mkdir()
    (folder / "other/data.txt").touch()
    from bigtrain import check as check_run

    with pytest.raises(ConfigError) as caught:
        check_run("quickstart", "model={path: base}", "output.directory=other")
    keys = [problem.key for problem in caught.value.problems]
    assert keys == ["output.directory", "model.path"]
