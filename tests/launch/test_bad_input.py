"""What a user gets wrong: one text that names it, exit code 2, no traceback, nothing created."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from bigtrain.cli import main as bigtrain
from bigtrain.models.build import build_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.weights.checksums import sum_of, write_sums
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

# Changes of the tiny run (two layers, positions for 64 tokens), the world size, parts of the text.
BROKEN: dict[str, tuple[list[str], int, tuple[str, ...]]] = {
    "misspelt key": (
        ["optimizer.weight_decy=1e-3"],
        1,
        ("weight_decy = 0.001: unknown key", "did you mean optimizer.weight_decay?"),
    ),
    "misspelt section": (["optimiser.lr=1e-3"], 1, ("did you mean optimizer?",)),
    "wrong type": (["train.steps=many"], 1, ("train.steps = 'many'",)),
    "batch": (["batch.micro_batch_size=3"], 1, ("batch.global_batch_size = 8", "3")),
    "stages": (["parallel.pipeline=4"], 4, ("is more than the model's 2 layers",)),
    "heads": (["parallel.sequence=3", "batch.sequence_length=48"], 3, ("does not divide its",)),
    "positions": (["batch.sequence_length=128"], 1, ("max_position_embeddings = 64", "at most 64")),
    "no layers": (["model.overrides={num_hidden_layers: 0}"], 1, ("= 0: must be at least 1",)),
    "misspelt override": (["model.overrides={hidden_sise: 64}"], 1, ("did you mean",)),
    "huge": (["parallel.sequence=100000000"], 1, ("does not divide its",)),
    "huge world": (["parallel.sequence=100000000"], 100000000, ("does not divide its",)),
    "huge batch": (["batch.global_batch_size=1000000000039"], 7, ("must be a multiple",)),
    "true": (["train.steps=true"], 1, ("True: must be a number, not true or false",)),
    "one": (["output.export=1"], 1, ("output.export = 1: must be true or false",)),
    "elsewhere": (["optimizer.learning_rate=1"], 1, ("did you mean optimizer.lr?",)),
    "derived": (["train.gradient_accumulation_steps=2"], 1, ("accumulation is derived from",)),
    "section": (["optimizer.micro_batch_size=2"], 1, ("did you mean batch.micro_batch_size?",)),
    "rank": (["profile.ranks=[0, 2]"], 2, ("profile.ranks = 2: valid ranks are 0 to 1",)),
    "nowhere": (["output.directory='  '"], 1, ("must name the directory of the run",)),
    "no date": (["seed=2020-13-45"], 1, ("month must be in 1..12",)),
    "list as key": (["model.overrides={[a]: 1}"], 1, ("YAML of model.overrides={[a]: 1}: ",)),
    "tracker": (["logging.trackers=[tensorbord]"], 1, ("tensorbord", "tensorboard")),
    "json key": (["--deepspeed_config", "KEY"], 1, ("gradient_cliping", "gradient_clipping")),
    "two files": (["--deepspeed_config", "CLIP"], 1, ("0.25", "optimizer.clip_norm", "1.0")),
    "no json": (["--deepspeed_config", "zero4"], 1, ("zero4", "zero3")),
}
AT_A_PATH = {"stages", "heads", "no layers"}
"""Runs whose model is in a directory."""


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.timeout(60)
def test_check_and_run_refuse_with_one_text(
    name: str,
    inputs: Inputs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # What a process of this launch has said already, it would not say again.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    changes, world_size, parts = BROKEN[name]
    tree = yaml.safe_load(inputs.run_yaml.read_text())
    tree["output"]["directory"] = str(tmp_path / "run")
    if name in AT_A_PATH:
        (tmp_path / "model").mkdir()
        (tmp_path / "model/config.json").write_text(json.dumps(tree["model"]["config"]))
        tree["model"] = {"path": str(tmp_path / "model")}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    for key, change in (("KEY", {"gradient_cliping": 1.0}), ("CLIP", {"gradient_clipping": 0.25})):
        (tmp_path / key).write_text(json.dumps({**json.loads(ZERO3.read_text()), **change}))
    words = [str(tmp_path / word) if word in ("KEY", "CLIP") else word for word in changes]
    if not changes[0].startswith("--"):  # an option between overrides, as train.py takes it
        options = ["--deepspeed_config", "zero1" if world_size != 4 else "pipeline_zero1"]
        words = [words[0], *options, *words[1:]]
    words = ["--config", str(tmp_path / "run.yaml"), *words]
    assert bigtrain(["check", "--world-size", str(world_size), *words]) == 2
    checked = capsys.readouterr().err.removeprefix("bigtrain check: ")
    for part in parts:
        assert part in checked
    if world_size > 1:
        place = {"WORLD_SIZE": str(world_size), "RANK": "0"}
        for key, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
            monkeypatch.setenv(key, value)
    before = snapshot(inputs.run_yaml.parent)
    assert train(words) == 2
    assert capsys.readouterr().err.removeprefix("train.py: ") == checked
    assert snapshot(inputs.run_yaml.parent) == before
    assert not (tmp_path / "run").exists()


def test_check_accepts_the_run_itself(inputs: Inputs, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", "seed=4", "--config", str(inputs.run_yaml), "train.steps=5", "--resolved"]
    assert bigtrain([*words, "--world-size", "2", "optimizer.lr=1.0e-3"]) == 0
    shown = capsys.readouterr().out
    for line in ("seed: 4", "steps: 5", "lr: 0.001"):
        assert line in shown


@pytest.fixture
def refused(
    inputs: Inputs,
    alone: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Refused:
    """Start train.py on the tiny run with changes, below `tmp_path`; returns what it says."""

    def run(*changes: str, config: str | Path = inputs.run_yaml) -> str:
        monkeypatch.chdir(tmp_path)
        before = snapshot(tmp_path), snapshot(inputs.run_yaml.parent)
        capsys.readouterr()
        words = ["--config", str(config), f"output.directory={tmp_path / 'run'}"]
        assert train([*words, *changes]) == 2
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


def test_files_and_names(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    output = tmp_path / "file" / "run"
    wrong = f"output.directory = '{output}': {tmp_path / 'file'} is not a directory -> choose"
    only(refused(f"output.directory={output}"), wrong)
    text = refused("optimizer.lr_rate=1", "train.steps=0", "batch.sequence_length=-1")
    assert text.startswith("train.py: 3 problems in ")
    assert all(key in text for key in ("optimizer.lr_rate", "train.steps", "batch.sequence_length"))
    text = refused(config="quikstart")
    assert "--config = 'quikstart': neither a file nor the name of a recipe" in text
    assert "did you mean quickstart?" in text
    (tmp_path / "broken.yaml").write_text("model: [unclosed\n")
    text = refused(config=tmp_path / "broken.yaml")
    assert "broken.yaml" in text
    assert "line 1, column 1: " in text
    assert "'model: [unclosed'" in text


# -- model and data ---------------------------------------------------------------------------


def test_models_that_do_not_fit(refused: Refused, inputs: Inputs, tmp_path: Path) -> None:
    tree = yaml.safe_load(inputs.run_yaml.read_text())
    for key in ("path", "config"):
        tree["model"] = {key: "nobody/has-this-model"}
        (tmp_path / "named.yaml").write_text(yaml.safe_dump(tree))
        text = refused(config=tmp_path / "named.yaml")
        assert f"model.{key} = 'nobody/has-this-model': is neither a directory here nor" in text
        assert len(text.splitlines()) == 1
    text = refused("model.config.model_type=lama")
    assert "model.config.model_type = 'lama': unknown type of causal LM" in text
    for size, word in ((300, "too small"), (VOCAB_SIZE + 2000, "too large")):
        text = refused(f"model.config.vocab_size={size}")
        only(text, f"model vocab_size = {size}: {word}", f"has {VOCAB_SIZE} tokens")


def test_data_that_does_not_fit(refused: Refused, inputs: Inputs, tmp_path: Path) -> None:
    only(refused("data.path=nowhere"), "data.path = 'nowhere'")
    words = ["tokenizer", "--input", inputs.texts, "--vocab-size", 290]
    assert bigtrain([*map(str, words), "--output", str(tmp_path / "other")]) == 0
    text = refused(f"data.tokenizer={tmp_path / 'other'}")
    only(text, "data.tokenizer", "a different tokenizer", "290")
    texts = write_documents(tmp_path / "few.jsonl", 8)
    shards = tokenize(texts, inputs.tokenizer, tmp_path / "few")
    text = refused(f"data.path={shards}", "batch.global_batch_size=4096")
    assert "too short for one global batch" in text
    assert "one step takes 4096" in text


def test_shards_that_are_damaged(refused: Refused, inputs: Inputs, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    shutil.copytree(inputs.shards, shards)
    file = next(shards.glob("train*.bin"))
    os.truncate(file, file.stat().st_size - 2)
    only(refused(f"data.path={shards}"), file.name, "bytes")
    file = next(shards.glob("train*.idx"))
    file.unlink()
    only(refused(f"data.path={shards}"), file.name)


# -- launchers --------------------------------------------------------------------------------


def test_variables_of_launchers(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")  # as accelerate launch --cpu does
    text = refused()
    assert "MASTER_ADDR but not RANK and WORLD_SIZE" in text
    assert "--multi_gpu" in text
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "RANK must be in 0..WORLD_SIZE-1" in refused()
    monkeypatch.setenv("RANK", "0")
    with socket.create_server(("", 0)) as holder:
        port = str(holder.getsockname()[1])
        monkeypatch.setenv("MASTER_PORT", port)
        text = refused()
    assert f"port {port} of {socket.gethostname()} (MASTER_PORT)" in text
    assert "Address already in use" in text
    assert "--master_port" in text


def ended_alike(finished: object, run: Path) -> str:
    """Return the output of ranks that have ended with one text of each error, and created
    nothing."""
    output = str(finished.output)  # type: ignore[attr-defined]
    assert finished.code != 0, output  # type: ignore[attr-defined]
    assert 'File "' + str(Path(train.__code__.co_filename)) not in output
    assert not (run / "config.json").exists()
    return output


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["forked", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_two_processes_say_it_once(name: str, inputs: Inputs, home: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["--config", inputs.run_yaml, f"output.directory={run}", "optimizer.lr_rate=1"]
    if name == "forked":
        finished = run_train(*words, num_processes=2)
    else:
        finished = launch([*launcher(name), *words], home)
    assert ended_alike(finished, run).count("optimizer.lr_rate = 1: unknown key") == 1


@pytest.mark.distributed
def test_corrupt_contents_are_found_by_all_processes(inputs: Inputs, tmp_path: Path) -> None:
    """The sizes are right; each file is read by one process, and both stop with one text."""
    shards, run = tmp_path / "shards", tmp_path / "run"
    shutil.copytree(inputs.shards, shards)
    corrupt = [next(shards.glob(f"{split}*.bin")) for split in ("train", "held_out")]
    for file in corrupt:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    words = ["--config", inputs.run_yaml, f"output.directory={run}", "batch.micro_batch_size=4"]
    changed = [f"data.path={shards}", "data.verify=contents"]
    output = ended_alike(run_train(*words, *changed, num_processes=2), run)
    assert output.count("2 of 6 files of the data are corrupt") == 1, output
    for file in corrupt:
        assert f"{file} is corrupt: its checksum " in output


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
        monkeypatch.setenv("MASTER_PORT", "1234")
        if name == "TMPDIR":
            monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
        assert train(["--config", "nowhere"]) == 2
        assert "1 problem" in capsys.readouterr().err


@pytest.mark.distributed
@pytest.mark.parametrize("listed", ["nowhere", "by an export", "by an earlier start"])
def test_weights_that_are_missing_or_flipped(inputs: Inputs, tmp_path: Path, listed: str) -> None:
    """Found out only after the process group exists."""
    run, model = tmp_path / "run", tmp_path / "model"
    tree = yaml.safe_load(inputs.run_yaml.read_text())
    section = ModelSection(config=tree["model"]["config"])
    build_model(section, load_hf_config(section), seed=0).save_pretrained(model)
    weights, where = model / "model.safetensors", model / "checksums.json"
    sums = {weights.name: sum_of(weights)}
    if listed == "by an earlier start":
        run.mkdir()
        where, sums = run / "base_model.json", {str(weights): sum_of(weights)}
    said = f"model.path = '{model}'"
    if listed == "nowhere":
        weights.unlink()
    else:
        write_sums(where, sums)
        content = bytearray(weights.read_bytes())
        content[-1000] ^= 4
        weights.write_bytes(content)
        said += ": its files are corrupt or have changed"
    tree["model"], tree["output"]["directory"] = {"path": str(model)}, str(run)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    finished = run_train("--config", tmp_path / "run.yaml")
    assert finished.code == 2
    output = ended_alike(finished, run)
    assert output.count(said) == 1, output
    assert "Traceback" not in output
    if listed != "nowhere":
        assert f"{where} lists {len(content)} and" in output


# -- the other commands -----------------------------------------------------------------------


def test_tokenize(refused_command: Refused, inputs: Inputs, tmp_path: Path) -> None:
    source, output = tmp_path / "empty.jsonl", ["--output", tmp_path / "shards"]
    source.write_text("")
    words = ["tokenize", "--input", source, "--tokenizer"]
    assert "nowhere" in refused_command(*words, "nowhere", *output)
    for text in ("", "\n\n", '{"text": ""}\n'):
        source.write_text(text)
        said = refused_command(*words, inputs.tokenizer, *output)
        assert "the input has no training tokens" in said


def test_export(refused_command: Refused, finished_run: Path, tmp_path: Path) -> None:
    def refuse(run: Path, output: Path, *more: str) -> str:
        return refused_command("export", "--run", run, "--output", output, *more)

    nowhere, hf = tmp_path / "nowhere", tmp_path / "hf"
    assert f"{nowhere}: no such directory -> name a run's output.directory" in refuse(nowhere, hf)
    assert "no checkpoint of step 4; steps: 8, 12" in refuse(finished_run, hf, "--step", "4")
    (tmp_path / "file").write_text("mine")
    output = tmp_path / "file" / "hf"
    said = refuse(finished_run, output)
    assert f"{output}: cannot be written: [Errno 20] Not a directory" in said
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    shutil.rmtree(run / "tokenizer")
    assert str(run / "tokenizer") in refuse(run, hf)
    hf.mkdir()
    (hf / "precious.txt").write_text("mine")
    assert f"{hf}: exists already" in refuse(finished_run, hf)


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


def test_export_of_corrupt_weights(
    refused_command: Refused,
    finished_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where one step is left that is not corrupt it is exported, and why is said."""
    run, hf = tmp_path / "run", tmp_path / "hf"
    shutil.copytree(finished_run, run)
    newest, before = (
        next((run / f"checkpoints/step-{step:08d}/tensors").glob("*.safetensors"))
        for step in (12, 8)
    )
    newest.write_bytes(newest.read_bytes()[:-10])
    capsys.readouterr()
    assert bigtrain(["export", "--run", str(run), "--output", str(hf)]) == 0
    printed = capsys.readouterr()
    assert "step 8, reloaded" in printed.out
    [said] = [line for line in printed.err.splitlines() if line.startswith("bigtrain export: ")]
    assert f"skipping corrupt checkpoint at step 12: {newest}" in said
    contents = bytearray(before.read_bytes())
    contents[len(contents) // 2] ^= 0xFF
    before.write_bytes(contents)
    said = refused_command("export", "--run", run, "--output", tmp_path / "other")
    assert "rank-00000.safetensors: " in said


def test_generate(refused_command: Refused, finished_run: Path, tmp_path: Path) -> None:
    def refuse(model: str | Path, prompt: str = "x") -> str:
        return refused_command("generate", "--model", model, "--prompt", prompt)

    nowhere = tmp_path / "nowhere"
    assert f"--model = '{nowhere}': cannot be loaded: no such directory" in refuse(nowhere)
    said = refuse(finished_run)  # which is not yet, or no longer, a model
    assert f"cannot be loaded: it is a run, whose model is {finished_run / 'hf'}" in said
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    said = refuse(tmp_path / "run")
    assert f"not been exported -> bigtrain export --run {tmp_path / 'run'} --output DIR" in said
    assert "it has no config.json, so it is not a Hugging Face directory" in refuse(tmp_path)
    said = refuse("nobody/has-this-model")
    assert "--model = 'nobody/has-this-model': cannot be loaded" in said
    assert "--prompt: is empty" in refuse(finished_run / "hf", "")
