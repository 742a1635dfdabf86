"""Every command ends with the next one to type."""

from __future__ import annotations

import inspect
import shlex
from pathlib import Path
from typing import Any

import pytest

from bigtrain.cli import main
from bigtrain.commands.registry import COMMANDS, build_parser, command_module
from bigtrain.system.arguments import command_words, read_arguments
from bigtrain.system.next_commands import model_line, next_lines, run_lines, shards_line, train_line
from bigtrain.train import build_parser as train_parser
from tests.support.datasets import write_dataset

ENDS_OTHERWISE = {
    "generate": "prints the text of the model, and nothing else",
    "schema": "prints a file",
    "completion": "prints a file",
    "outer-server": "serves until it is stopped",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_ends_with_the_next_one(name: str) -> None:
    source = inspect.getsource(command_module(name))
    assert ("next_lines(" in source) != (name in ENDS_OTHERWISE), name


def next_words(output: str) -> list[str]:
    """The words of the first line after "next:", which `output` ends with."""
    commands = output.rpartition("next:\n")[2].splitlines()
    assert commands
    assert all(command.startswith("  ") for command in commands)
    command = commands[0]
    return shlex.split(command, comments=True)


def accepted(words: list[str]) -> Any:
    """What the parser of the program makes of a command line; exits if it is wrong."""
    program, *rest = words
    if program == "bigtrain":
        return read_arguments(build_parser(rest[0]).parse_args(rest))
    place = next(index for index, word in enumerate(words) if word.endswith("bigtrain/train.py"))
    assert Path(words[place]).is_file()
    return train_parser().parse_intermixed_args(words[place + 1 :])


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_dataset(tmp_path / "the shards", vocab_size=50)


def test_what_follows_a_tokenizer_and_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The options of reading are kept; what is typed next is accepted, up to the run YAML."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my texts").mkdir()
    (tmp_path / "my texts/a.md").write_text("some words, and some more words\n" * 40)
    given = ["--input", "my texts", "--suffix", ".md", "--exclude", "b*", "--vocab-size", "270"]
    assert main(["tokenizer", *given, "--output", "tokenizer/"]) == 0
    words = next_words(capsys.readouterr().out)
    assert words[:4] == ["bigtrain", "tokenize", "--input", "my texts"]
    assert {"--suffix", "--exclude", "--tokenizer"} <= {*words}
    assert main(words[1:]) == 0
    words = next_words(capsys.readouterr().out)
    assert words == shlex.split("bigtrain init --new-model quickstart --data shards")
    assert main(words[1:]) == 0
    assert "next:\n  bigtrain check --config run.yaml" in capsys.readouterr().out
    for command in (["inspect", "shards"], ["verify", "shards"]):
        assert main(command) == 0
        assert next_words(capsys.readouterr().out) == words


def test_check_ends_with_the_start_of_the_run(
    shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [f"data.path={shards}", "batch.global_batch_size=64", "model.config.vocab_size=50"]
    for more, start in (
        ([], "python"),
        (["--world-size", "2"], "deepspeed --quiet --num_accelerators 2"),
        (
            ["--world-size", "8", "--deepspeed_config", "zero3"],
            "deepspeed --quiet --num_accelerators 8",
        ),
        (["--world-size", "16"], "deepspeed --hostfile HOSTFILE"),
    ):
        assert main(["check", "--config", "quickstart", *more, *settings]) == 0
        output = capsys.readouterr().out
        assert len(output.splitlines()) < 12
        assert "this run can start; next:" in output
        words = next_words(output)
        assert " ".join(words).startswith(start)
        arguments = accepted(words)
        assert arguments.config == "quickstart"
        assert {*settings} <= {*arguments.overrides}
        assert arguments.deepspeed_config == ("zero3" if "zero3" in more else None)


def test_a_run_ends_with_its_report_and_what_its_model_is_used_by(tmp_path: Path) -> None:
    """A chat where the export's tokenizer has a template; a score head generates nothing."""
    for number, (files, use) in enumerate(
        (
            ({}, "generate --prompt TEXT"),
            ({"chat_template.jinja": ""}, "generate --chat"),
            ({"tokenizer_config.json": '{"chat_template": "x"}'}, "generate --chat"),
            ({"tokenizer_config.json": "not JSON"}, "generate --prompt TEXT"),
            ({"config.json": '{"architectures": ["XForSequenceClassification"]}'}, "verify"),
            ({"config.json": '{"architectures": ["XForCausalLM"]}'}, "generate --prompt TEXT"),
        )
    ):
        folder = tmp_path / f"run {number}/hf"
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name).write_text(text)
        report, line = run_lines(folder.parent, folder)
        assert accepted(shlex.split(report)).run == folder.parent
        assert line == model_line(folder)
        words = shlex.split(line)
        assert [words[1], *words[4:]] == use.split()
        assert str(accepted(words).model) == str(folder)
    export = accepted(shlex.split(run_lines(tmp_path / "run 0", None)[1]))
    assert export.run == tmp_path / "run 0"


def test_shards_of_trained_weights_are_for_these_weights(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert accepted(shlex.split(shards_line("s/", str(tmp_path)))).model == str(tmp_path)
    assert accepted(shlex.split(shards_line("s/", "owner/name"))).model == "owner/name"
    (tmp_path / "model.safetensors").unlink()
    assert accepted(shlex.split(shards_line("s/", str(tmp_path)))).new_model == "quickstart"


@pytest.mark.parametrize(
    "line",
    [
        "tokenize --input 'a file' b --suffix .md --suffix .rst --exclude 'x*' --follow-links "
        "--key prompt=question --role human=user --held-out 0.25 --tokenizer t --output o",
        "tokenize --input a --text-key a,b --skip-bad --tokenizer t --output o",
        "plan --config c.yaml --gpus 8xH100-80GB --nodes-of 4 --longest train.steps=2 seed=3",
        "score --config c.yaml --output s --kind top-k --min-perplexity 1.5",
        "check --config c.yaml --world-size 4 --deepspeed_config zero3 --inputs a.b=c",
        "launch slurm --config c --nodes 1-2 --time 1:00:00 --sbatch partition=gpu train.steps=2",
        "fetch s3://bucket/run 'to here' --step 3",
    ],
)
def test_words_are_written_as_they_are_read(line: str) -> None:
    words = shlex.split(line)
    command = words[: 2 if words[0] == "launch" else 1]
    read = accepted(["bigtrain", *words])
    assert accepted(["bigtrain", *command, *command_words(read)]) == read


def test_words_leave_out_defaults_and_take_changes() -> None:
    read = accepted(shlex.split("bigtrain score --config c.yaml --output s --kind documents"))
    words = command_words(read, filter="kept/")
    assert words == shlex.split("--config c.yaml --output s --filter kept/")


def test_the_words_of_a_command_are_quoted() -> None:
    assert next_lines("a", "b") == "next:\n  a\n  b"
    line = train_line(["--config", "my run.yaml", "model.config={a: 1}"], 1)
    assert shlex.split(line)[-2:] == ["my run.yaml", "model.config={a: 1}"]
