"""The shipped JSON schema of the run YAML is that of the settings, and judges as they do."""

from __future__ import annotations

import copy
from typing import Any

import jsonschema
import pytest

from bigtrain.cli import main
from bigtrain.settings.commented_yaml import SHIPPED, commented_yaml, run_schema, setting_names
from bigtrain.settings.loading import load_run_config, parse_yaml, recipe_names
from bigtrain.settings.run_config import RunConfig
from bigtrain.system.shipped_files import recipes

SCHEMA = jsonschema.Draft202012Validator(run_schema())


def tree_of(recipe: str) -> dict[str, Any]:
    tree = parse_yaml((recipes() / f"{recipe}.yaml").read_text(), recipe)
    assert isinstance(tree, dict)
    return tree


def test_the_shipped_file_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    """And what the command prints."""
    assert main(["schema"]) == 0
    written = SHIPPED.read_text(encoding="utf-8")
    assert written == capsys.readouterr().out, f"bigtrain schema --output {SHIPPED}"
    jsonschema.Draft202012Validator.check_schema(run_schema())
    for recipe in recipe_names():
        SCHEMA.validate(tree_of(recipe))


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("train", "stops", 1),
        ("train", "steps", 0),
        ("train", "steps", True),
        ("train", "steps", "many"),
        ("precision", "dtype", "bf16"),
        ("schedule", "min_lr_ratio", 1.5),
        ("optimizer", "betas", [0.9]),
        ("checkpoint", "asynchronous", "yes"),
    ],
)
def test_what_a_section_refuses_the_schema_refuses(section: str, key: str, value: object) -> None:
    tree = copy.deepcopy(tree_of("quickstart"))
    tree.setdefault(section, {})[key] = value
    assert not SCHEMA.is_valid(tree)


def test_every_setting_is_described_or_names_its_choices() -> None:
    schema = run_schema()
    names = set(setting_names())
    assert {"train.steps", "optimizer.muon.lr", "seed", "data.sources.path"} <= names
    for section in [schema, *schema["$defs"].values()]:
        assert section["description"]
        for name, field in section["properties"].items():
            plain = field.keys() & {"enum", "const", "type"}
            assert field.get("description") or "$ref" in field or plain, name


def test_a_commented_yaml_reads_back() -> None:
    config = load_run_config("quickstart")
    tree = config.model_dump(mode="json", exclude_unset=True)
    text = commented_yaml(tree, ["two", "lines"])
    assert RunConfig.model_validate(parse_yaml(text, "text")) == config
    assert max(map(len, text.splitlines())) <= 100
    assert "\n# two\n# lines\n" in text
