"""Samples of user code: rows, order, identity, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bigtrain.data.loading.dataset_checks import check_weights
from bigtrain.data.loading.loader import open_training_data
from bigtrain.data.samples.source import SourceSamples, with_source
from bigtrain.data.shards.dataset import open_dataset
from bigtrain.errors import BigtrainError, DataError
from bigtrain.settings.batch_plan import plan_batch
from tests.support.datasets import write_dataset
from tests.support.run_trees import llama, run_config
from tests.support.weighted import FIRST_WEIGHTED, weights_of, write_weighted

LENGTH = 8


def items(count: int = 30) -> list[dict[str, list[int]]]:
    rows = []
    for number in range(count):
        tokens = [1 + number % 50] * (2 + number % LENGTH)
        labels = [-100, *tokens[1:]]
        labels[len(tokens) // 2] = -100
        rows.append({"input_ids": tokens, "labels": labels})
    return rows


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "shards", vocab_size=64)


def config(shards: Path) -> Any:
    data = {"path": str(shards), "samples": {"type": "bigtrain:given"}}
    batch = {"sequence_length": LENGTH, "global_batch_size": 6, "micro_batch_size": 3}
    return run_config(model=llama(64), data=data, batch=batch, train={"steps": 10})


def test_an_epoch_reads_every_item_once_and_ranks_share_it(shards: Path) -> None:
    run = config(shards)
    source = items()
    dataset = with_source(run, open_dataset(shards), source)
    seen = []
    for rank in (0, 1):
        plan, _ = plan_batch(run.batch, 2)
        assert plan is not None
        batches = open_training_data(run, plan, rank, datasets=[dataset])
        for step in range(5):
            for batch in batches.step(step * 6):
                seen += [(a.tolist(), b.tolist()) for a, b in zip(*_parts(batch), strict=True)]
        batches.close()
    expected = []
    for item in source:
        tokens = item["input_ids"] + [0] * (LENGTH + 1 - len(item["input_ids"]))
        labels = item["labels"] + [-100] * (LENGTH + 1 - len(item["labels"]))
        expected.append((tokens[:-1], labels[1:]))
    assert sorted(seen) == sorted(expected)


def _parts(batch: Any) -> tuple[Any, Any]:
    return batch.input_ids, batch.labels


def test_the_identity_follows_items_and_length(shards: Path) -> None:
    run, dataset = config(shards), open_dataset(shards)

    def identity(source: object) -> int:
        return int(with_source(run, dataset, source).table.splits["train"].rows["xxh3"][0])

    source = items()
    changed = copy.deepcopy(source)
    changed[-1]["labels"] = changed[-1]["input_ids"]
    assert identity(source) == identity(items())
    assert len({identity(source), identity(changed), identity(items(31))}) == 3


class Faulty:
    """A source with one item that is wrong."""

    def __init__(self, item: Any) -> None:
        self.item = item

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return self.item() if callable(self.item) else self.item


class _Failing:
    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("on another device")


def weighted(weights: list[Any]) -> dict[str, Any]:
    return {"input_ids": [1, 2, 3], "loss_weights": weights}


def _draw() -> list[int]:
    return np.random.default_rng().integers(0, 64, 8).tolist()


def _fail() -> Any:
    raise KeyError("nothing")


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ([1], "has 1 tokens; a sample has 2 to 9"),
        ([1] * 10, "has 10 tokens; a sample has 2 to 9"),
        ([1, 64], "has input_ids[1] = 64; ids are 0 to 63"),
        ([1, 2, -5], "has input_ids[2] = -5; ids are 0 to 63"),
        (np.array([1, 1 << 63], np.uint64), "has input_ids[1] = 9223372036854775807; ids are 0"),
        ([1, 1 << 70], "input_ids is of type object and shape [2]"),
        ([[1, 2], [3]], "input_ids: setting an array element with a sequence"),
        ([True, False], "input_ids is of type bool and shape [2]"),
        (None, "input_ids is of type object and shape []"),
        ("text", "input_ids is of type <U4 and shape []"),
        (_Failing(), "input_ids: on another device"),
        ([1.0, 2.0], "input_ids is of type float64 and shape [2]"),
        ([[1, 2]], "shape [1, 2]"),
        ({"labels": [1, 2]}, "has no input_ids"),
        ({"input_ids": [1, 2], "attention_mask": [1, 1]}, "has 'attention_mask'"),
        ({"input_ids": [1, 2], "labels": [1]}, "has 2 input_ids and 1 labels"),
        ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, "labels[0] = 2 is not input_ids[0] = 1"),
        (weighted([1, 1]), "has 3 input_ids and 2 loss_weights"),
        (weighted([1, 0.5, -0.5]), "item 0 loss_weights[2] is -0.5, a factor of a loss"),
        (weighted([1, float("nan"), 1]), "item 0 loss_weights[1] is nan, a factor of a loss"),
        (weighted([1e39, 1, 1]), "item 0 loss_weights[0] is 1e+39, a factor of a loss"),
        (weighted(["1", "2", "3"]), "loss_weights is of type <U1 and shape [3]"),
        (weighted([[1, 1, 1]]), "loss_weights is of type int64 and shape [1, 3]"),
        (_draw, "is another one when it is read again"),
        (_fail, f"item 0 raised KeyError: 'nothing' ({__file__}:"),
    ],
)
def test_a_faulty_item(shards: Path, item: Any, text: str) -> None:
    with pytest.raises(BigtrainError) as caught:
        with_source(config(shards), open_dataset(shards), Faulty(item))
    assert text in str(caught.value)
    assert __file__ in str(caught.value)


def test_weights_of_losses_are_read(shards: Path) -> None:
    """Those of targets, 1 elsewhere; a token of weight 0 is not a target."""
    run = config(shards)
    items = [{"input_ids": [5, 6, 7, 8], "labels": [-100, 6, 7, 8], "loss_weights": w} for w in
             ([9, 0, 0.25, 3], np.array([1, 1, 2, 0.5], np.float16))] * 3  # fmt: skip
    dataset = with_source(run, open_dataset(shards), items)
    assert dataset.table.is_weighted
    plan, _ = plan_batch(run.batch, 1)
    assert plan is not None
    batches = open_training_data(run, plan, 0, datasets=[dataset])
    read = [
        (labels[:3].tolist(), weights.tolist())
        for batch in batches.step(0)
        for labels, weights in zip(batch.labels, batch.weights, strict=True)
    ]
    batches.close()
    rest = [0.0] * (LENGTH - 3)
    first, second = ([-100, 7, 8], [0, 0.25, 3, *rest]), ([6, 7, 8], [1, 2, 0.5, *rest])
    assert sorted(read) == sorted([first, second] * 3)
    plain = with_source(
        run, open_dataset(shards), [dict(item, loss_weights=None) for item in items]
    )
    assert not plain.table.is_weighted
    other = with_source(
        run, open_dataset(shards), [*items[:-1], {**items[-1], "loss_weights": [1] * 4}]
    )
    sums = {one.table.splits["train"].rows["xxh3"][0] for one in (dataset, plain, other)}
    assert len(sums) == 3  # a resume notices other weights


def test_documents_of_a_dataset_with_weights_are_samples(shards: Path, tmp_path: Path) -> None:
    """Also of its shards without weights, whose documents have the weight 1."""
    path = write_weighted(tmp_path / "w", low=FIRST_WEIGHTED, vocab_size=64, shards=(9, 9, 2))
    documents = open_dataset(path).documents()
    assert len(documents) == 18
    for number, document in enumerate(documents):
        targets = document["labels"] != -100
        expected = weights_of(document["input_ids"])
        assert (document["loss_weights"][targets] == expected[targets]).all(), number
    run = config(shards)
    short = [
        {name: values[: LENGTH + 1] for name, values in document.items()} for document in documents
    ]
    samples = with_source(run, open_dataset(shards), short).train
    assert samples.weighs_loss
    assert all((samples.read(n).tokens == one["input_ids"]).all() for n, one in enumerate(short))


def test_weights_that_begin_later_are_refused(shards: Path) -> None:
    """Whether a run computes weighted losses is decided by the items that are read before it."""
    many = [{"input_ids": [1, 2]}] * 1000
    many[1] = {"input_ids": [1, 2], "loss_weights": [1, 1]}
    dataset = with_source(config(shards), open_dataset(shards), many)
    with pytest.raises(DataError, match="item 1 has loss_weights, and the items that were read be"):
        dataset.train.read(1)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"model": {"loss": "liger"}}, "model.loss"),
        ({"objective": {"mtp_weight": 0.1}}, "objective.mtp_weight"),
    ],
)
def test_weights_that_a_run_does_not_read_are_refused(
    shards: Path, settings: dict[str, Any], key: str
) -> None:
    run = config(shards)
    update = {
        name: getattr(run, name).model_copy(update=values) for name, values in settings.items()
    }
    run = run.model_copy(update=update)
    source = [{"input_ids": [1, 2], "loss_weights": [1, 0.5]}] * 3
    [problem] = check_weights(run, [with_source(run, open_dataset(shards), source).table])
    assert problem.key == key
    assert "which data.samples has" in problem.rule


def test_no_items(shards: Path) -> None:
    with pytest.raises(DataError, match="has no items"):
        SourceSamples([], "data = list", LENGTH, open_dataset(shards))


def test_a_dataset_is_the_sequence_of_its_documents(tmp_path: Path) -> None:
    path = write_dataset(tmp_path / "masked", vocab_size=64, masked=True, num_shards=3)
    dataset = open_dataset(path)
    documents = list(dataset)
    assert len(dataset) == len(documents) == dataset.table.num_documents("train")
    stored = [
        (shard.document(n).tolist(), shard.document_mask(n).tolist())
        for shard in dataset.shards("train")
        for n in range(shard.num_documents)
    ]
    read = [(d["input_ids"].tolist(), (d["labels"] != -100).tolist()) for d in documents]
    assert read == stored
    assert all(
        (d["labels"] == np.where(d["labels"] == -100, -100, d["input_ids"])).all()
        for d in documents
    )
    assert (dataset[-1]["input_ids"] == documents[-1]["input_ids"]).all()
    assert [len(d["input_ids"]) for d in dataset.documents("held_out")[1:3]] == [
        len(dataset.documents("held_out")[n]["input_ids"]) for n in (1, 2)
    ]
    with pytest.raises(IndexError, match=f"document {len(dataset)} of"):
        dataset[len(dataset)]
    assert len(open_dataset(path).documents("held_out")) == 6
