"""Help is complete: every command and argument says what it is, its default, and the exit codes."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bigtrain.cli import COMMANDS, build_parser, main
from bigtrain.commands.export import ExportArguments
from bigtrain.commands.merge import MergeArguments
from bigtrain.commands.report import DEFAULT_PORT
from bigtrain.data.shards.manifest import DEFAULT_MAX_DOCUMENT_BYTES, DEFAULT_SHARD_BYTES
from bigtrain.models.export.base_record import BaseRecord
from bigtrain.models.export.verified import Destination
from bigtrain.python_api.scoring import DEFAULT_TOP_K
from bigtrain.run.checkpointing import export
from bigtrain.system.arguments import field_texts, size
from bigtrain.train import build_parser as train_parser

NO_DEFAULT = (None, False, [], ())


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command's parser by name, those of commands below a command and train.py's too."""
    named_parsers = [("bigtrain", build_parser(*COMMANDS)), ("train.py", train_parser())]
    while named_parsers:
        name, parser = named_parsers.pop()
        yield name, parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                named_parsers += [(f"{name} {word}", sub) for word, sub in action.choices.items()]


PARSERS = dict(parsers())


def test_a_command_says_what_it_does_and_how_it_exits() -> None:
    assert {f"bigtrain {name}" for name in COMMANDS} | {"bigtrain launch slurm"} < PARSERS.keys()
    for name, parser in PARSERS.items():
        text = parser.description or ""
        assert text[:1].isupper() or text.startswith("bigtrain"), name
        assert "Exit codes: 0" in (parser.epilog or ""), name


ARGUMENTS = [
    (name, action.option_strings[0] if action.option_strings else action.dest, action)
    for name, parser in PARSERS.items()
    for action in parser._actions
    if action.help != argparse.SUPPRESS and not isinstance(action, argparse._SubParsersAction)
]


def test_every_argument_says_what_it_is_and_its_default() -> None:
    for name, flag, action in ARGUMENTS:
        assert action.help, f"{name} {flag}"
        text = action.help % {**vars(action), "prog": "bigtrain"}
        assert not text.endswith("."), f"{name} {flag}: {text}"
        if action.default not in NO_DEFAULT and action.default != argparse.SUPPRESS:
            assert "default" in text or str(action.default) in text, f"{name} {flag}: {text}"


DEFAULT = re.compile(r"\(default: ([^\s);,:]+)\)")
CODE_DEFAULTS: dict[tuple[str, str], object] = {
    ("bigtrain tokenize", "--max-document-bytes"): DEFAULT_MAX_DOCUMENT_BYTES,
    ("bigtrain tokenize", "--shard-size"): DEFAULT_SHARD_BYTES,
    ("bigtrain report", "--port"): DEFAULT_PORT,
    ("bigtrain score", "--top-k"): DEFAULT_TOP_K,
}
"""Defaults of the code behind an argument without one of its own."""


def test_the_text_of_an_argument_names_its_default() -> None:
    for name, flag, action in ARGUMENTS:
        named = DEFAULT.search(action.help or "")
        if (name, flag) in CODE_DEFAULTS:
            assert action.default is None
            assert named is not None, flag
            assert size(named[1]) == CODE_DEFAULTS[name, flag], flag
        elif named and action.default not in (*NO_DEFAULT, argparse.SUPPRESS):
            default = action.default
            shown = f"{default:g}" if isinstance(default, float) else str(default)
            assert named[1] == shown, flag


def test_the_dtype_of_an_export_is_by_default_that_of_the_base(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As the texts of `--dtype` name it, and not the run's where there is a base."""
    config: Any = SimpleNamespace(
        precision=SimpleNamespace(dtype="bfloat16"), model=SimpleNamespace(path=None)
    )
    dtypes: list[str | None] = []
    monkeypatch.setattr(
        export, "export_model", lambda _, __, to, **___: dtypes.append(to.dtype) or []
    )
    for has_base in (True, False):
        record = BaseRecord(tmp_path) if has_base else None
        monkeypatch.setattr(export.BaseRecord, "find", staticmethod(lambda _, found=record: found))
        destination = Destination(tmp_path / "hf", tmp_path / "tokenizer", None)
        probe: Any = None
        export.write_export(tmp_path, destination, {}, None, config, as_stored=(), probe=probe)
    assert dtypes == [None, "bfloat16"]
    for record in (ExportArguments, MergeArguments):
        text = field_texts(record)["dtype"]
        assert "default: the dtype of each tensor in the base; without a base the run's" in text


def test_a_reader_that_has_seen_enough_costs_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "bigtrain.cli", "schema"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_what_is_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    for name, words in (
        ("train", "a launcher starts training: deepspeed bigtrain/train.py"),
        ("trian", "a launcher starts training: deepspeed bigtrain/train.py"),
        ("tokenise", "unknown command tokenise -> did you mean tokenize"),
        ("xyz", "unknown command xyz -> bigtrain --help"),
    ):
        with pytest.raises(SystemExit) as ended:
            main([name])
        assert ended.value.code == 2
        assert words in capsys.readouterr().err


def test_without_arguments_it_is_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--help"])
    assert shown == capsys.readouterr().out


@pytest.mark.slow
def test_importing_torchao_says_nothing() -> None:
    """Its warnings of kernels for other devices are no part of what `export` and `generate` say."""
    pytest.importorskip("torchao")
    code = (
        "import sys; sys.argv[1:] = ['--version']\n"
        "from bigtrain import cli\n"
        "cli.exit_process = lambda code: None\n"
        "try: cli.program()\n"
        "except SystemExit: pass\n"
        "import torchao.quantization"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--verison"], "unrecognized arguments: --verison -> did you mean --version?"),
        (["--hlep"], "unrecognized arguments: --hlep -> did you mean --help?"),
        (["--colour"], "unrecognized arguments: --colour -> bigtrain --help"),
        (["plan", "--top", "abc"], "argument --top: 'abc' is not a whole number of at least 1"),
        (["generate", "--temperature", "x"], "argument --temperature: 'x' is not a number"),
        (["tokenize", "--held-out", "half"], "argument --held-out: 'half' is not a number from 0"),
    ],
)
def test_a_word_that_is_not_an_argument_is_said_in_plain_words(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words)
    error = capsys.readouterr().err
    assert text in error
    assert " -> " in error


@pytest.mark.parametrize("command", ["export", "merge"])
@pytest.mark.parametrize(("text", "dtype"), [("bf16", "bfloat16"), ("float32", "float32")])
def test_dtypes_have_short_names(command: str, text: str, dtype: str) -> None:
    parser = build_parser(command)
    words = [command, "--run", "runs/a", "--output", "hf", "--dtype", text]
    assert parser.parse_args(words).dtype == dtype
