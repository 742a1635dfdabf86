"""`import bigtrain` offers what it says, and loads it when it is used."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import bigtrain
from bigtrain.data.tokenize_job.options import TokenizeOptions, TrainTokenizerOptions
from bigtrain.errors import ConfigError, DataError
from bigtrain.system.arguments import field_texts
from tests.support.pages import page_text
from tests.support.worlds import ROOT


def named_for_type_checkers() -> dict[str, str]:
    """Module by name, as the package's file imports them for mypy and editors."""
    tree = ast.parse((ROOT / "bigtrain/__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    return {
        alias.name: str(node.module)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_names_are_the_same_for_python_and_for_type_checkers() -> None:
    assert named_for_type_checkers() == bigtrain._HOME
    assert set(bigtrain.__all__) == {*bigtrain._HOME, "__version__"}
    assert set(bigtrain.__all__) <= set(dir(bigtrain))


@pytest.mark.parametrize("name", sorted(bigtrain._HOME))
def test_every_name_is_there_documented_and_typed(name: str) -> None:
    value = getattr(bigtrain, name)
    assert inspect.getdoc(value)
    if inspect.isfunction(value):
        signature = inspect.signature(value)
        assert signature.return_annotation is not inspect.Signature.empty
        for parameter in signature.parameters.values():
            assert parameter.annotation is not inspect.Parameter.empty, parameter


def test_what_is_not_offered_is_an_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'fit'"):
        _ = bigtrain.fit


def test_loading_a_run_and_checking_it_needs_no_torch() -> None:
    code = (
        "import json, sys, bigtrain\n"
        "light = [m for m in sys.modules if m.startswith('bigtrain')]\n"
        "run = bigtrain.load_config('quickstart', 'train.steps=20', 'output.directory=runs/none')\n"
        "bigtrain.check(run, world_size=2)\n"
        "assert callable(bigtrain.train_run)\n"
        "heavy = [n for n in ('torch', 'deepspeed', 'transformers', 'numpy') if n in sys.modules]\n"
        "print(json.dumps([light, run.train.steps, heavy]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [["bigtrain"], 20, []]


def test_a_run_is_loaded_from_each_kind_of_source(tmp_path: Path) -> None:
    recipe = bigtrain.load_config("quickstart", "train.steps=20")
    tree = recipe.model_dump(mode="json", exclude_unset=True)
    assert bigtrain.load_config(tree) == recipe
    assert bigtrain.load_config(recipe) is recipe
    assert bigtrain.load_config(recipe, "train.steps=30").train.steps == 30
    assert tree["train"]["steps"] == 20
    with pytest.raises(ConfigError, match=r"train\.stops"):
        bigtrain.load_config(tree, "train.stops=1")


def test_metrics_by_kind_and_by_column(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "loss": 2.0},
        {"step": 1, "held_out_loss": 3.0},
        {"step": 2, "event": "skipped", "loss": None},
        {"step": 2, "outer_step": 1},
        {"step": 2, "loss": 1.5, "lr": 0.1},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "lo')
    assert bigtrain.read_metrics(tmp_path) == [lines[0], lines[4]]
    assert bigtrain.read_metrics(tmp_path, None) == lines
    assert bigtrain.read_metrics(tmp_path, "evaluation") == [lines[1]]
    assert bigtrain.read_metric_columns(tmp_path, "event")["event"] == ["skipped"]
    assert bigtrain.read_metrics(tmp_path, "outer_step")[0]["outer_step"] == 1
    columns = bigtrain.read_metric_columns(tmp_path)
    assert columns == {"step": [1, 2], "loss": [2.0, 1.5], "lr": [None, 0.1]}
    path.write_text('{"step": 1, "loss": 2.0}\nno JSON\n')
    with pytest.raises(DataError, match="line 2 is not a JSON object"):
        bigtrain.read_metrics(tmp_path)
    with pytest.raises(DataError, match="name the directory of a run"):
        bigtrain.read_metrics(tmp_path / "nowhere")


def test_options_of_tokenize_are_parameters_and_documented() -> None:
    for record, function in (
        (TokenizeOptions, bigtrain.tokenize),
        (TrainTokenizerOptions, bigtrain.train_tokenizer),
    ):
        names = {field.name for field in fields(record)}
        assert inspect.signature(function).parameters.keys() == names
        assert field_texts(record).keys() == names
    with pytest.raises(TypeError, match="held"):
        bigtrain.tokenize("texts", "tokenizer", "shards", held=0.1)  # type: ignore[call-arg]


def test_every_command_has_a_function_or_a_reason() -> None:
    """By the table of the page on Python: as many rows as commands, and names that are there."""
    from bigtrain.cli import COMMANDS

    page = page_text("docs/howto/python.md")
    rows = dict(re.findall(r"^\| `bigtrain ([\w-]+)` \| (.+) \|$", page, flags=re.M))
    assert rows.keys() == COMMANDS.keys()
    named: set[str] = set()
    for command, text in rows.items():
        names = re.findall(r"`(\w+)`", text)
        assert names or text.startswith("none: "), command
        assert all(inspect.isfunction(getattr(bigtrain, name)) for name in names), command
        named |= set(names)
    functions = {name for name in bigtrain._HOME if inspect.isfunction(getattr(bigtrain, name))}
    beside = set(re.findall(r"`(\w+)`", page.partition("No command has")[2].partition("\n\n")[0]))
    assert named | beside == functions
    assert not named & beside
