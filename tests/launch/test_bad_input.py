"""What a user gets wrong: one text that names it, exit code 2, no traceback, nothing created."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from bigtrain.cli import main as bigtrain
from bigtrain.models.build import build_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.weights.checksums import sum_of, write_sums
from bigtrain.settings.loading import load_run_config
from bigtrain.settings.run_config import ModelSection
from bigtrain.train import main as train
from tests.launch.conftest import (
    VOCAB_SIZE,
    ZERO3,
    Inputs,
    launch,
    launcher,
    snapshot,
    tokenize,
    write_documents,
)
from tests.launch.conftest import train as run_train

Refused = Callable[..., str]


@pytest.fixture
def refused(
    inputs: Inputs,
    alone: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Refused:
    """Start train.py on the tiny run with changes, below `tmp_path`; returns what it says."""

    def run(*changes: str, config: str | Path = inputs.run_yaml, **options: str | Path) -> str:
        monkeypatch.chdir(tmp_path)
        before = snapshot(tmp_path), snapshot(inputs.run_yaml.parent)
        arguments = ["--config", str(config), f"output.directory={tmp_path / 'run'}"]
        for name, value in options.items():
            arguments += [f"--{name}", str(value)]
        capsys.readouterr()
        assert train([*arguments, *changes]) == 2
        printed = capsys.readouterr()
        assert without_deepspeed(printed.out) == ""
        assert printed.err.startswith("train.py: ")
        assert "Traceback" not in printed.err
        assert (snapshot(tmp_path), snapshot(inputs.run_yaml.parent)) == before
        return printed.err

    return run


@pytest.fixture
def refused_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Call `bigtrain`; returns what it says."""

    def run(*words: str | Path) -> str:
        before = snapshot(tmp_path)
        capsys.readouterr()
        assert bigtrain(list(map(str, words))) == 2
        printed = capsys.readouterr()
        assert without_deepspeed(printed.out) == ""
        assert printed.err.startswith(f"bigtrain {words[0]}: ")
        assert "Traceback" not in printed.err
        assert len(printed.err.splitlines()) == 1
        assert snapshot(tmp_path) == before
        return printed.err

    return run


def without_deepspeed(text: str) -> str:
    """`text` without what DeepSpeed says when it is first imported where there is no GPU."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if "[WARNING] [real_accelerator.py" not in line)


def only(text: str, *parts: str) -> None:
    """`text` is about one problem, and has every part."""
    assert text.startswith("train.py: 1 problem in "), text
    assert len(text.splitlines()) == 2, text
    for part in parts:
        assert part in text, (part, text)


def test_an_output_directory_that_cannot_be_written(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    output = tmp_path / "file" / "run"
    text = refused(f"output.directory={output}")
    only(
        text,
        f"output.directory = '{output}': {tmp_path / 'file'} is not a directory -> choose another",
    )


# -- the run YAML -----------------------------------------------------------------------------


def test_misspelt_key(refused: Refused) -> None:
    text = refused("optimizer.weight_decy=1e-3")
    only(text, "optimizer.weight_decy = 0.001: unknown key", "did you mean optimizer.weight_decay?")


def test_misspelt_section(refused: Refused) -> None:
    only(refused("optimiser.lr=1e-3"), "optimiser", "unknown key", "did you mean optimizer?")


def test_value_of_a_wrong_type(refused: Refused) -> None:
    only(refused("train.steps=many"), "train.steps = 'many'")


def test_batch_that_does_not_divide(refused: Refused) -> None:
    only(refused("batch.micro_batch_size=3"), "batch.global_batch_size = 8", "3")


def test_all_problems_at_once(refused: Refused) -> None:
    text = refused("optimizer.lr_rate=1", "train.steps=0", "batch.sequence_length=-1")
    assert text.startswith("train.py: 3 problems in ")
    assert all(key in text for key in ("optimizer.lr_rate", "train.steps", "batch.sequence_length"))


def test_configuration_that_does_not_exist(refused: Refused) -> None:
    text = refused(config="quikstart")
    assert "--config = 'quikstart': neither a file nor the name of a recipe" in text
    assert "did you mean quickstart?" in text


def test_broken_yaml(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("model: [unclosed\n")
    text = refused(config=tmp_path / "broken.yaml")
    assert "broken.yaml" in text
    assert "line 1, column 1: " in text
    assert "'model: [unclosed'" in text


def test_sequence_longer_than_the_positions(refused: Refused) -> None:
    text = refused("batch.sequence_length=128")
    only(text, "batch.sequence_length = 128", "max_position_embeddings = 64", "at most 64")


def test_tracker_that_is_not_installed(refused: Refused) -> None:
    missing = [n for n in ("comet_ml", "wandb", "mlflow") if importlib.util.find_spec(n) is None]
    if not missing:
        pytest.skip("every tracker is installed here")
    text = refused(f"logging.trackers=[{missing[0]}]")
    only(text, f"logging.trackers = '{missing[0]}'", "not installed", "pip install")


def test_tracker_that_nobody_knows(refused: Refused) -> None:
    only(refused("logging.trackers=[tensorbord]"), "logging.trackers", "tensorbord", "tensorboard")


# -- the DeepSpeed JSON -----------------------------------------------------------------------


def deepspeed_json(path: Path, **changes: Any) -> Path:
    path.write_text(json.dumps({**json.loads(ZERO3.read_text()), **changes}))
    return path


def test_unknown_deepspeed_key(refused: Refused, tmp_path: Path) -> None:
    file = deepspeed_json(tmp_path / "mine.json", gradient_cliping=1.0)
    only(refused(deepspeed_config=file), "gradient_cliping", "gradient_clipping", "mine.json")


def test_contradiction_of_the_two_files(refused: Refused, tmp_path: Path) -> None:
    file = deepspeed_json(tmp_path / "mine.json", gradient_clipping=0.25)
    only(refused(deepspeed_config=file), "gradient_clipping", "0.25", "optimizer.clip_norm", "1.0")


def test_deepspeed_json_that_does_not_exist(refused: Refused) -> None:
    text = refused(deepspeed_config="zero4")
    assert "zero4" in text
    assert "zero3" in text


# -- model and data ---------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["path", "config"])
def test_model_name_that_does_not_exist(
    key: str, refused: Refused, inputs: Inputs, tmp_path: Path
) -> None:
    tree = yaml.safe_load(inputs.run_yaml.read_text())
    tree["model"] = {key: "nobody/has-this-model"}
    (tmp_path / "named.yaml").write_text(yaml.safe_dump(tree))
    text = refused(config=tmp_path / "named.yaml")
    assert f"model.{key} = 'nobody/has-this-model': is neither a directory here nor" in text
    assert len(text.splitlines()) == 1


def test_model_type_that_does_not_exist(refused: Refused) -> None:
    text = refused("model.config.model_type=lama")
    assert "model.config.model_type = 'lama': unknown type of causal LM" in text
    assert "llama" in text


@pytest.mark.parametrize(("size", "word"), [(300, "too small"), (VOCAB_SIZE + 2000, "too large")])
def test_shards_of_another_tokenizer(refused: Refused, size: int, word: str) -> None:
    text = refused(f"model.config.vocab_size={size}")
    only(text, f"model vocab_size = {size}: {word}", f"has {VOCAB_SIZE} tokens")


def test_data_tokenizer_that_is_another(
    refused: Refused, tmp_path: Path, inputs: Inputs, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    words = ["tokenizer", "--input", inputs.texts, "--vocab-size", 290, "--output", other]
    assert bigtrain(list(map(str, words))) == 0
    only(refused(f"data.tokenizer={other}"), "data.tokenizer", "a different tokenizer", "290")


def test_dataset_that_does_not_exist(refused: Refused) -> None:
    only(refused("data.path=nowhere"), "data.path = 'nowhere'")


def test_dataset_too_short_for_a_batch(refused: Refused, inputs: Inputs, tmp_path: Path) -> None:
    texts = write_documents(tmp_path / "few.jsonl", 8)
    shards = tokenize(texts, inputs.tokenizer, tmp_path / "few")
    text = refused(f"data.path={shards}", "batch.global_batch_size=4096")
    assert "too short for one global batch" in text
    assert "one step takes 4096" in text


def test_truncated_shard(refused: Refused, inputs: Inputs, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    shutil.copytree(inputs.shards, shards)
    file = next(shards.glob("train*.bin"))
    os.truncate(file, file.stat().st_size - 2)
    only(refused(f"data.path={shards}"), file.name, "bytes")


def test_missing_shard(refused: Refused, inputs: Inputs, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    shutil.copytree(inputs.shards, shards)
    file = next(shards.glob("train*.idx"))
    file.unlink()
    only(refused(f"data.path={shards}"), file.name)


# -- launchers --------------------------------------------------------------------------------


def test_launcher_that_tells_no_rank(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")  # as accelerate launch --cpu does
    text = refused()
    assert "MASTER_ADDR but not RANK and WORLD_SIZE" in text
    assert "--multi_gpu" in text


def test_rank_outside_the_world(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "RANK must be in 0..WORLD_SIZE-1" in refused()


def test_port_that_is_taken(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as holder:
        port = str(holder.getsockname()[1])
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MASTER_PORT", port)
        text = refused()
    assert f"port {port} of {socket.gethostname()} (MASTER_PORT)" in text
    assert "Address already in use" in text
    assert "--master_port" in text


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["forked", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_two_processes_say_it_once(name: str, inputs: Inputs, home: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ["--config", inputs.run_yaml, f"output.directory={run}", "batch.micro_batch_size=8"]
    arguments.append("optimizer.lr_rate=1")
    if name == "forked":
        finished = run_train(*arguments, num_processes=2)
    else:
        finished = launch([*launcher(name), *arguments], home)
    assert finished.code != 0
    assert finished.output.count("optimizer.lr_rate = 1: unknown key") == 1
    assert 'File "' + str(Path(train.__code__.co_filename)) not in finished.output
    assert not run.exists()


@pytest.mark.distributed
def test_corrupt_contents_are_found_by_all_processes(inputs: Inputs, tmp_path: Path) -> None:
    """The sizes are right; each file is read by one process, and both stop with one text."""
    shards, run = tmp_path / "shards", tmp_path / "run"
    shutil.copytree(inputs.shards, shards)
    for split in ("train", "held_out"):
        file = next(shards.glob(f"{split}*.bin"))
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    arguments = ["--config", inputs.run_yaml, f"output.directory={run}", "batch.micro_batch_size=4"]
    changed = [f"data.path={shards}", "data.verify=contents"]
    finished = run_train(*arguments, *changed, num_processes=2)
    assert finished.code != 0
    assert finished.output.count("2 of 6 files of the data are corrupt") == 1, finished.output
    for split in ("train", "held_out"):
        corrupt = next(shards.glob(f"{split}*.bin"))
        assert f"{corrupt} is corrupt: its checksum " in finished.output
    assert 'File "' + str(Path(train.__code__.co_filename)) not in finished.output
    assert not run.exists()


@pytest.mark.usefixtures("alone")
def test_processes_of_a_launch_say_each_failure_once_and_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "3")
    said = []
    for rank, name in (("1", "nowhere"), ("0", "nowhere"), ("2", "elsewhere"), ("1", "elsewhere")):
        monkeypatch.setenv("RANK", rank)
        assert train(["--config", name]) == 2
        said.append(capsys.readouterr().err)
    for text, rank in ((said[0], 1), (said[2], 2)):
        assert text.startswith("train.py: 1 problem")
        assert text.endswith(f" (rank {rank} of 3)\n")
    assert said[1] == said[3] == ""
    for name in ("MASTER_PORT", "TMPDIR"):  # of another launch; nowhere to write it down
        said = []
        monkeypatch.setenv("MASTER_PORT", "1234")
        if name == "TMPDIR":
            monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
        assert train(["--config", "nowhere"]) == 2
        assert "1 problem" in capsys.readouterr().err


@pytest.mark.distributed
def test_weights_that_do_not_fit_create_nothing(inputs: Inputs, tmp_path: Path) -> None:
    """Found out only after the process group exists."""
    run, model = tmp_path / "run", tmp_path / "model"
    tree = load_run_config(str(inputs.run_yaml)).model_dump(mode="json")
    model.mkdir()
    (model / "config.json").write_text(json.dumps(tree["model"]["config"]))
    tree["model"] = {"path": str(model)}
    tree["output"]["directory"] = str(run)
    (tmp_path / "weightless.yaml").write_text(yaml.safe_dump(tree))
    finished = run_train("--config", tmp_path / "weightless.yaml")
    assert finished.code == 2, finished.output
    assert finished.output.count(f"model.path = '{model}'") == 1
    assert "Traceback" not in finished.output
    assert not run.exists()


@pytest.mark.distributed
@pytest.mark.parametrize("listed", ["by an export", "by an earlier start"])
def test_flipped_weights_are_refused(inputs: Inputs, tmp_path: Path, listed: str) -> None:
    run, model = tmp_path / "run", tmp_path / "model"
    tree = load_run_config(str(inputs.run_yaml)).model_dump(mode="json")
    section = ModelSection(config=tree["model"]["config"])
    build_model(section, load_hf_config(section), seed=0).save_pretrained(model)
    weights = model / "model.safetensors"
    sums = {weights.name: sum_of(weights)}
    where = model / "checksums.json"
    if listed == "by an earlier start":
        run.mkdir()
        where, sums = run / "base_model.json", {str(weights): sum_of(weights)}
    write_sums(where, sums)
    content = bytearray(weights.read_bytes())
    content[-1000] ^= 4
    weights.write_bytes(content)
    tree["model"] = {"path": str(model)}
    tree["output"]["directory"] = str(run)
    (tmp_path / "flipped.yaml").write_text(yaml.safe_dump(tree))
    finished = run_train("--config", tmp_path / "flipped.yaml")
    assert finished.code == 2, finished.output
    assert (
        finished.output.count(f"model.path = '{model}': its files are corrupt or have changed") == 1
    )
    assert f"{where} lists {len(content)} and" in finished.output
    assert "Traceback" not in finished.output
    assert not (run / "config.json").exists()


# -- the other commands -----------------------------------------------------------------------


def test_tokenize_with_a_missing_tokenizer(
    refused_command: Refused, inputs: Inputs, tmp_path: Path
) -> None:
    words = ["--input", inputs.texts, "--tokenizer", "nowhere", "--output", tmp_path / "shards"]
    assert "nowhere" in refused_command("tokenize", *words)


@pytest.mark.parametrize("text", ["", "\n\n", '{"text": ""}\n'], ids=["nothing", "blank", "empty"])
def test_tokenize_an_empty_dataset(
    text: str, refused_command: Refused, inputs: Inputs, tmp_path: Path
) -> None:
    source = tmp_path / "empty.jsonl"
    source.write_text(text)
    words = ["--input", source, "--tokenizer", inputs.tokenizer, "--output", tmp_path / "shards"]
    assert "the input has no training tokens" in refused_command("tokenize", *words)


def test_export_of_something_that_is_no_run(refused_command: Refused, tmp_path: Path) -> None:
    said = refused_command("export", "--run", tmp_path / "nowhere", "--output", tmp_path / "hf")
    assert f"{tmp_path / 'nowhere'}: has no usable checkpoint" in said


def test_export_of_a_step_that_is_not_kept(
    refused_command: Refused, finished_run: Path, tmp_path: Path
) -> None:
    words = ["--run", finished_run, "--output", tmp_path / "hf", "--step", "4"]
    assert "no checkpoint of step 4; steps: 8, 12" in refused_command("export", *words)


def test_export_onto_something(
    refused_command: Refused, finished_run: Path, tmp_path: Path
) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "precious.txt").write_text("mine")
    said = refused_command("export", "--run", finished_run, "--output", tmp_path / "hf")
    assert f"{tmp_path / 'hf'}: exists already" in said


def test_export_to_a_place_that_cannot_be_written(
    refused_command: Refused, finished_run: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    output = tmp_path / "file" / "hf"
    said = refused_command("export", "--run", finished_run, "--output", output)
    assert f"{output}: cannot be written: [Errno 20] Not a directory" in said


def test_export_to_a_disk_that_fills(
    refused_command: Refused, finished_run: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a disk")
    try:
        said = refused_command("export", "--run", finished_run, "--output", disk / "hf")
    finally:
        subprocess.run(["umount", disk], check=True)
    assert f"{disk / 'hf'}: cannot be written: " in said
    assert "No space left on device" in said
    assert "-> make room, or export the checkpoint to another directory" in said


def test_export_of_a_run_without_its_tokenizer(
    refused_command: Refused, finished_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    shutil.rmtree(run / "tokenizer")
    said = refused_command("export", "--run", run, "--output", tmp_path / "hf")
    assert str(run / "tokenizer") in said


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_export_of_corrupt_weights(
    damage: str, refused_command: Refused, finished_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    for step in ("step-00000008", "step-00000012"):
        [file] = (run / "checkpoints" / step / "tensors").glob("*.safetensors")
        contents = bytearray(file.read_bytes())
        if damage == "cut":
            del contents[-10:]
        else:
            contents[len(contents) // 2] ^= 0xFF
        file.write_bytes(contents)
    said = refused_command("export", "--run", run, "--output", tmp_path / "hf")
    assert "rank-00000.safetensors: " in said


def test_export_of_an_older_step_says_why(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    [file] = (run / "checkpoints/step-00000012/tensors").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-10])
    capsys.readouterr()
    assert bigtrain(["export", "--run", str(run), "--output", str(tmp_path / "hf")]) == 0
    printed = capsys.readouterr()
    assert "step 8, reloaded" in printed.out
    [said] = [line for line in printed.err.splitlines() if line.startswith("bigtrain export: ")]
    assert "skipping corrupt checkpoint at step 12: " in said
    assert str(file) in said


def test_generate_with_a_missing_model(refused_command: Refused, tmp_path: Path) -> None:
    said = refused_command("generate", "--model", tmp_path / "nowhere", "--prompt", "x")
    assert f"--model = '{tmp_path / 'nowhere'}': cannot be loaded: no such directory" in said


def test_generate_with_a_run(refused_command: Refused, finished_run: Path, tmp_path: Path) -> None:
    """Which is not yet, or no longer, a model."""
    said = refused_command("generate", "--model", finished_run, "--prompt", "x")
    assert f"cannot be loaded: it is a run, whose model is {finished_run / 'hf'}" in said
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    said = refused_command("generate", "--model", tmp_path / "run", "--prompt", "x")
    assert f"not been exported -> bigtrain export --run {tmp_path / 'run'} --output DIR" in said
    said = refused_command("generate", "--model", tmp_path, "--prompt", "x")
    assert "it has no config.json, so it is not a Hugging Face directory" in said


def test_generate_with_a_hub_name_offline(refused_command: Refused) -> None:
    said = refused_command("generate", "--model", "nobody/has-this-model", "--prompt", "x")
    assert "--model = 'nobody/has-this-model': cannot be loaded" in said


def test_generate_without_a_prompt(refused_command: Refused, finished_run: Path) -> None:
    said = refused_command("generate", "--model", finished_run / "hf", "--prompt", "")
    assert "--prompt: is empty" in said
