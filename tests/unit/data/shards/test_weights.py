"""Weights of the losses of tokens: from rows to shards, checks of their files, and batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bigtrain.cli import main
from bigtrain.data.loading.dataset_checks import check_weights
from bigtrain.data.loading.loader import open_training_data
from bigtrain.data.samples.kept_documents import write_kept
from bigtrain.data.samples.phases import data_hash
from bigtrain.data.shards.dataset import open_dataset
from bigtrain.data.shards.manifest import MANIFEST_NAME, PerplexityFilterRecord, read_manifest
from bigtrain.data.shards.verification import corrupt_files
from bigtrain.errors import DataError
from bigtrain.settings.batch_plan import plan_batch
from bigtrain.settings.run_config import RunConfig
from tests.support.chats import save_chat_tokenizer
from tests.support.run_trees import llama, run_config
from tests.support.weighted import FIRST_WEIGHTED, weights_of, write_weighted

VOCAB_SIZE = 96


def tokenize(directory: Path, rows: list[dict[str, Any]], name: str, *more: str) -> int:
    if not (directory / "tokenizer").exists():
        save_chat_tokenizer(directory / "tokenizer")
    source = directory / f"{name}.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        "--input",
        source,
        "--tokenizer",
        directory / "tokenizer",
        "--output",
        directory / name,
    ]
    return main(["tokenize", *map(str, words), *more])


def row_of(number: int, weight: float) -> dict[str, Any]:
    ids = list(range(number + 2, number + 9))
    return {"input_ids": ids, "loss_weights": [0, 1, weight, weight, 1, 0, weight]}


def test_rows_with_weights_become_shards(tmp_path: Path) -> None:
    """Weights of a shard begin after documents that have none."""
    rows = [row_of(n, 1) for n in range(20)] + [row_of(n, 0.3) for n in range(20)]
    assert tokenize(tmp_path, rows, "out") == 0
    dataset = open_dataset(tmp_path / "out")
    assert dataset.table.is_weighted
    assert len(dataset) == 40
    for row, document in zip(rows, dataset, strict=True):
        learned = np.array(row["loss_weights"]) != 0
        assert document["input_ids"].tolist() == row["input_ids"]
        assert (document["labels"] != -100).tolist() == learned.tolist()
        expected = np.where(learned, row["loss_weights"], 1).astype(np.float32)
        assert document["loss_weights"].tolist() == expected.tolist()
    assert (tmp_path / "out/train-00000.weights").stat().st_size == 4 * 7 * 40
    assert corrupt_files(tmp_path / "out") == []


def test_weights_of_0_and_1_are_a_mask(tmp_path: Path) -> None:
    """The shards are the same, byte by byte."""
    rows = [row_of(n, 1) for n in range(20)]
    masks = [{**r, "loss_weights": None, "loss_mask": r["loss_weights"]} for r in rows]
    assert tokenize(tmp_path, rows, "weights") == 0
    assert tokenize(tmp_path, masks, "masks") == 0
    names = sorted(path.name for path in (tmp_path / "weights").glob("train*"))
    assert names == sorted(path.name for path in (tmp_path / "masks").glob("train*"))
    assert not any("weights" in name for name in names)
    for name in names:
        contents = [(tmp_path / kind / name).read_bytes() for kind in ("weights", "masks")]
        assert contents[0] == contents[1]


def config_of(*paths: Path, **sections: Any) -> RunConfig:
    sources = [{"path": str(path), "weight": 1} for path in paths]
    data = {"sources": sources, "packing": "best_fit", "allow_other_tokenizer": True}
    batch = {"sequence_length": 32, "micro_batch_size": 4}
    return run_config(**{"model": llama(VOCAB_SIZE), "data": data, "batch": batch, **sections})


def test_a_batch_has_the_weights_of_its_labels(tmp_path: Path) -> None:
    paths = [
        write_weighted(tmp_path / name, low=low, vocab_size=VOCAB_SIZE)
        for name, low in (("weighted", FIRST_WEIGHTED), ("plain", 0))
    ]
    config = config_of(*paths)
    plan, _ = plan_batch(config.batch, 1)
    assert plan is not None
    batches = open_training_data(config, plan, 0)
    for step in range(4):
        (batch,) = batches.step(4 * step)
        labels = batch.labels.numpy()
        expected = np.where(labels == -100, 0, weights_of(labels))
        assert batch.weights is not None
        assert batch.weights.numpy().tolist() == expected.tolist()
    batches.close()
    assert open_training_data(config_of(paths[1]), plan, 0).step(0)[0].weights is None


def test_files_of_weights_are_checked(tmp_path: Path) -> None:
    path = write_weighted(tmp_path / "set", low=FIRST_WEIGHTED, vocab_size=VOCAB_SIZE)
    config = config_of(path)
    plan, _ = plan_batch(config.batch, 1)
    assert plan is not None
    before = data_hash(config.data, [open_dataset(path)])
    other = write_weighted(tmp_path / "other", low=FIRST_WEIGHTED, vocab_size=VOCAB_SIZE)
    file = other / "train_00000.weights"
    content = bytearray(file.read_bytes())
    content[6] ^= 1
    file.write_bytes(content)
    (problem,) = corrupt_files(other)
    assert f"{file} is corrupt" in problem
    batches = open_training_data(config_of(other), plan, 0)
    with pytest.raises(DataError, match=r"train_00000\.weights is corrupt"):
        batches.step(0)
    batches.close()
    file.write_bytes(content[:-4])
    with pytest.raises(DataError, match=r"bytes, .* tokens have"):
        open_dataset(other)
    manifest = (path / MANIFEST_NAME).read_text()
    listed = read_manifest(path).shards("train")[0].weights_xxh3
    assert listed is not None
    (other / MANIFEST_NAME).write_text(manifest.replace(listed, "0123456789abcdef"))
    (other / "train_00000.weights").write_bytes((path / "train_00000.weights").read_bytes())
    assert data_hash(config.data, [open_dataset(other)]) != before


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"objective": {"type": "distillation", "teacher": "scores"}}, "objective.type"),
        ({"objective": {"type": "preference"}}, "objective.type"),
        ({"model": {"path": "m", "loss": "liger"}}, "model.loss"),
        ({"objective": {"mtp_weight": 0.1}}, "objective.mtp_weight"),
        ({}, None),
    ],
)
def test_weights_are_not_ignored(tmp_path: Path, sections: dict[str, Any], key: str | None) -> None:
    path = write_weighted(tmp_path / "set", low=FIRST_WEIGHTED, vocab_size=VOCAB_SIZE)
    plain = write_weighted(tmp_path / "plain", low=0, vocab_size=VOCAB_SIZE)
    tables = [open_dataset(one).table for one in (plain, path)]
    problems = check_weights(config_of(plain, path, **sections), tables)
    assert [problem.key for problem in problems] == ([key] if key else [])
    assert check_weights(config_of(plain, **sections), tables[:1]) == []


def test_documents_that_a_filter_keeps_have_their_weights(tmp_path: Path) -> None:
    path = write_weighted(tmp_path / "set", low=FIRST_WEIGHTED, vocab_size=VOCAB_SIZE)
    dataset = open_dataset(path)
    kept = np.arange(len(dataset)) % 3 == 1
    record = PerplexityFilterRecord(lowest=1, highest=2, model="m")
    write_kept(dataset, {"train": kept}, tmp_path / "kept", record)
    assert corrupt_files(tmp_path / "kept") == []
    for document, number in zip(
        open_dataset(tmp_path / "kept"), np.flatnonzero(kept).tolist(), strict=True
    ):
        for key, values in dataset[number].items():
            assert document[key].tolist() == values.tolist()
