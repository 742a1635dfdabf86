from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bigtrain.data.loading.held_out import (
    check_best,
    evaluation_notes,
    measured_split,
    open_held_out_datasets,
    tokens_per_byte,
)
from bigtrain.data.shards.dataset import open_dataset
from bigtrain.data.shards.manifest import read_manifest, write_manifest
from bigtrain.settings.run_config import RunConfig
from tests.support.datasets import write_dataset
from tests.support.run_trees import run_config

VOCAB_SIZE = 50


def config_of(path: Path, sequence_length: int = 8, **sections: Any) -> RunConfig:
    held_out = [{"name": "law", "path": str(path / "law")}]
    evaluation = {"every_steps": 1, "held_out": held_out, **sections.pop("evaluation", {})}
    batch = {"sequence_length": sequence_length, "global_batch_size": 1}
    data = {"path": str(path / "data")}
    return run_config(data=data, batch=batch, evaluation=evaluation, **sections)


def problems_of(path: Path, config: RunConfig) -> list[str]:
    _, problems = open_held_out_datasets(config, [open_dataset(path / "data")])
    return [str(problem) for problem in problems]


@pytest.mark.parametrize(
    ("options", "length", "text"),
    [
        (
            {"vocab_size": VOCAB_SIZE + 1},
            8,
            "made with a different tokenizer (synthetic, 51 tokens)",
        ),
        ({"vocab_size": VOCAB_SIZE, "masked": True}, 8, "would see each other -> data.packing="),
        ({"vocab_size": VOCAB_SIZE, "num_documents": 10}, 64, "too few for one sample of 64 + 1"),
    ],
)
def test_sets_that_cannot_be_measured(
    tmp_path: Path, options: dict[str, Any], length: int, text: str
) -> None:
    write_dataset(tmp_path / "data", vocab_size=VOCAB_SIZE)
    write_dataset(tmp_path / "law", **options)
    (problem,) = problems_of(tmp_path, config_of(tmp_path, length))
    assert problem.startswith(f"evaluation.held_out.0.path = '{tmp_path / 'law'}': ")
    assert text in problem


def test_a_set_that_is_not_there(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", vocab_size=VOCAB_SIZE)
    (problem,) = problems_of(tmp_path, config_of(tmp_path))
    assert "does not exist -> make it with `bigtrain tokenize --output`" in problem


def without_held_out(directory: Path) -> Path:
    manifest = read_manifest(directory)
    splits = {"train": manifest.splits["train"]}
    write_manifest(directory, manifest.model_copy(update={"splits": splits}))
    return directory


def test_without_held_out_documents_all_are_measured(tmp_path: Path) -> None:
    dataset = open_dataset(write_dataset(tmp_path / "law", vocab_size=VOCAB_SIZE))
    assert measured_split(dataset) == "held_out"
    whole = open_dataset(without_held_out(tmp_path / "law"))
    assert measured_split(whole) == "train"
    manifest = whole.manifest
    text_bytes = sum(shard.text_bytes for shard in manifest.shards("train"))
    assert tokens_per_byte(whole, "train") == manifest.num_tokens("train") / text_bytes
    masked = open_dataset(write_dataset(tmp_path / "m", vocab_size=VOCAB_SIZE, masked=True))
    assert tokens_per_byte(masked, "train") is None


def test_the_best_needs_figures(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", vocab_size=VOCAB_SIZE)
    data = open_dataset(without_held_out(tmp_path / "data"))
    law = open_dataset(write_dataset(tmp_path / "law", vocab_size=VOCAB_SIZE, masked=True))

    def check(metric: str, sets: list[Any]) -> list[str]:
        named = [{"name": "law", "path": "law"}][: len(sets)]
        evaluation = {"best": {"metric": metric}, "held_out": named}
        config = config_of(tmp_path, evaluation={**evaluation, "early_stopping": {"patience": 1}})
        return [str(problem) for problem in check_best(config, [data], sets)]

    assert check("held_out_loss", [law]) == []
    (none,) = check("held_out_loss", [])
    assert "the data has no held-out documents to select the best checkpoint" in none
    assert none.endswith("or set evaluation.early_stopping=null")
    (of_data,) = check("held_out_loss/data", [law])
    assert "data has no held-out documents" in of_data
    (unknown,) = check("held_out_bits_per_byte", [law])
    assert "is unknown for law: only some tokens of a conversation have a loss" in unknown


@pytest.mark.parametrize(
    ("evaluation", "has_held_out", "noted_keys"),
    [
        ({"held_out": []}, False, ["evaluation.every_steps"]),
        (
            {"held_out": [], "every_steps": None, "every_epochs": 0.5},
            False,
            ["evaluation.every_epochs"],
        ),
        ({}, False, []),
        ({"held_out": []}, True, []),
        ({"held_out": [], "prompts": ["A"]}, False, []),
        ({"held_out": [], "every_steps": None}, False, []),
    ],
)
def test_evaluations_that_measure_nothing_are_named(
    tmp_path: Path, evaluation: dict[str, Any], has_held_out: bool, noted_keys: list[str]
) -> None:
    data = write_dataset(tmp_path / "data", vocab_size=VOCAB_SIZE)
    if not has_held_out:
        without_held_out(data)
    write_dataset(tmp_path / "law", vocab_size=VOCAB_SIZE)
    config = config_of(tmp_path, evaluation=evaluation)
    datasets = [open_dataset(data)]
    sets, _ = open_held_out_datasets(config, datasets)
    notes = evaluation_notes(config, datasets, sets)
    assert [note.split(" = ")[0] for note in notes] == noted_keys
