"""Batches of packed documents and of masked tokens, as the loader gives them."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bigtrain.data.loading.dataset_checks import check_datasets
from bigtrain.data.loading.loader import open_training_data
from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.data.samples.packing_plan import (
    balanced,
    open_plan,
    packed_documents,
    packing_reports,
)
from bigtrain.data.samples.phases import data_hash, identify_sources
from bigtrain.data.shards.dataset import TokenDataset, open_dataset, open_sources
from bigtrain.data.shards.manifest import MANIFEST_NAME
from bigtrain.errors import DataError, Problem
from bigtrain.settings.batch_plan import BatchPlan
from bigtrain.settings.run_config import RunConfig
from bigtrain.system.files import file_checksum
from tests.support.datasets import forget_blocks, write_dataset
from tests.support.run_trees import llama, run_config

LENGTH = 48


def config_for(data: dict[str, Any], **batch: Any) -> RunConfig:
    data = {"packing": "best_fit", **data}
    return run_config(model=llama(97), data=data, batch={"sequence_length": LENGTH, **batch})


def hash_of(config: RunConfig) -> str:
    return data_hash(config.data, open_sources(config.data))


def problems_of(data: dict[str, Any]) -> list[Problem]:
    config = config_for(data)
    return check_datasets(config, open_sources(config.data)).problems


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("plain") / "set", vocab_size=97)


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(
        tmp_path_factory.mktemp("masked") / "set", vocab_size=97, seed=1, masked=True
    )


def pieces_of(batch: MicroBatch) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Tokens and labels of every document in a batch, cut where positions restart."""
    assert batch.position_ids is not None
    pieces = []
    for ids, labels, positions in zip(
        batch.input_ids.tolist(), batch.labels.tolist(), batch.position_ids.tolist(), strict=True
    ):
        begins = [place for place, position in enumerate(positions) if position == 0]
        for low, high in zip(begins, [*begins[1:], len(ids)], strict=True):
            assert positions[low:high] == list(range(high - low))
            pieces.append((tuple(ids[low:high]), tuple(labels[low:high])))
    return pieces


def documents_of(path: Path) -> list[tuple[list[int], list[bool]]]:
    documents = []
    for shard in open_dataset(path).shards("train"):
        mask = np.ones(shard.num_tokens, bool)
        if shard.mask_path is not None:
            bits = np.unpackbits(shard.mask_bytes, bitorder="little")
            mask = bits[: shard.num_tokens].astype(bool)
        begin = 0
        for length in shard.sequence_lengths.tolist():
            part = slice(begin, begin + length)
            documents.append((shard.tokens[part].tolist(), mask[part].tolist()))
            begin += length
    return documents


def expected_pieces(path: Path) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """What the model sees of each document: inputs, and labels where there is a loss."""
    pieces = []
    for tokens, mask in documents_of(path):
        for low in range(0, max(1, len(tokens) - 1), LENGTH):
            piece, bits = tokens[low : low + LENGTH + 1], mask[low + 1 : low + LENGTH + 1]
            labels = [token if bit else -100 for token, bit in zip(piece[1:], bits, strict=True)]
            if any(bits):
                pieces.append((tuple(piece), (*labels, -100)))
    return pieces


@pytest.mark.parametrize("kind", ["plain", "masked"])
def test_an_epoch_holds_every_document(kind: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(kind)
    config = config_for({"path": str(path)})
    (report, *_) = packing_reports(config, open_sources(config.data))
    samples = report.plan.num_packs
    plan = BatchPlan(samples, samples, 1, 1, LENGTH)
    with closing(open_training_data(config, plan, 0)) as batches:
        (batch,) = batches.step(0)
    expected = expected_pieces(path)
    pieces = []
    for ids, labels in pieces_of(batch):
        if set(ids) == {0} and set(labels) == {-100}:
            continue  # padding; token 0 alone is no document here
        assert any(label != -100 for label in labels)
        # The last token of a full row is no input, only the last label.
        last = 1 if (ids, labels) in expected else 0
        pieces.append((ids[: len(ids) - last], labels[: len(ids) - last]))
    assert sorted(pieces) == sorted((ids[:-1], labels[:-1]) for ids, labels in expected)
    places = samples * (LENGTH + 1)
    tokens = sum(len(ids) for ids, _ in expected)
    assert report.plan.padding_fraction == pytest.approx(1 - tokens / places)
    assert report.plan.padding_fraction < 0.15


@pytest.mark.parametrize("kind", ["plain", "masked"])
def test_each_document_has_samples_of_its_own(kind: str, request: pytest.FixtureRequest) -> None:
    """Each row begins with a piece of one document, and is padded after it."""
    path: Path = request.getfixturevalue(kind)
    config = config_for({"path": str(path), "packing": "none"})
    (report, *_) = packing_reports(config, open_sources(config.data))
    expected = expected_pieces(path)
    samples = report.plan.num_packs
    assert samples == len(expected)
    with closing(open_training_data(config, BatchPlan(samples, samples, 1, 1, LENGTH), 0)) as data:
        (batch,) = data.step(0)
    assert batch.position_ids is None
    found = []
    for ids, labels in zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True):
        length = max(place for place, label in enumerate(labels) if label != -100) + 1
        found.append((tuple(ids[:length]), tuple(labels[:length])))
        assert labels[length:] == [-100] * (LENGTH - length)
    # What follows the last target of a piece is not learned, and not compared.
    wanted = []
    for ids, labels in expected:
        length = max(place for place, label in enumerate(labels) if label != -100) + 1
        wanted.append((ids[:length], labels[:length]))
    assert sorted(found) == sorted(wanted)


def test_rows_that_are_mostly_padding_are_noted(plain: Path) -> None:
    longest = max(len(tokens) for tokens, _ in documents_of(plain)) - 1
    data = {"path": str(plain), "packing": "none"}
    config = config_for(data, sequence_length=4 * longest)
    (note,) = check_datasets(config, open_sources(config.data)).notes
    assert f"the longest document has {longest} tokens" in note
    config = config_for(data, sequence_length=longest)
    assert check_datasets(config, open_sources(config.data)).notes == []


def test_rows_do_not_depend_on_processes(plain: Path, masked: Path) -> None:
    mixture = {
        "sources": [{"path": str(plain), "weight": 0.5}, {"path": str(masked), "weight": 0.5}],
        "balance_attention": False,
    }
    config = config_for(mixture)
    whole = BatchPlan(8, 8, 1, 1, LENGTH)
    with closing(open_training_data(config, whole, 0)) as batches:
        (alone,) = batches.step(16)
    parts = []
    for rank in range(4):
        plan = BatchPlan(8, 2, 4, 1, LENGTH)
        with closing(open_training_data(config, plan, rank)) as batches:
            parts += batches.step(16)
    for name in ("input_ids", "labels", "position_ids"):
        together = torch.cat([getattr(part, name) for part in parts])
        assert torch.equal(together, getattr(alone, name))
    # Both kinds of sources are in it: documents all of whose tokens are targets, and others.
    whole_pieces = set(expected_pieces(plain))
    kinds = {piece in whole_pieces for piece in pieces_of(alone) if len(piece[0]) < LENGTH}
    assert kinds == {True, False}


def work_of(batch: MicroBatch) -> int:
    """Squares of the lengths of its documents, padding with them."""
    return sum(len(ids) ** 2 for ids, _ in pieces_of(batch))


def test_ranks_have_about_as_much_attention(plain: Path, masked: Path) -> None:
    """In every micro-step, with the samples that a step has without balance."""
    sources = [{"path": str(plain), "weight": 0.5}, {"path": str(masked), "weight": 0.5}]
    plan = BatchPlan(16, 2, 4, 2, LENGTH)
    slowest: dict[bool, list[float]] = {}
    steps: dict[bool, list[list[Any]]] = {}
    for balances in (False, True):
        config = config_for({"sources": sources, "balance_attention": balances})
        ranks = []
        for rank in range(4):
            with closing(open_training_data(config, plan, rank)) as batches:
                ranks.append([batches.step(16 * step) for step in range(6)])
        works = np.array([[[work_of(b) for b in step] for step in rank] for rank in ranks])
        slowest[balances] = (works.max(0) / works.mean(0)).ravel().tolist()
        steps[balances] = [
            sorted(row for rank in ranks for b in rank[step] for row in b.input_ids.tolist())
            for step in range(6)
        ]
    assert steps[True] == steps[False]
    assert np.mean(slowest[True]) - 1 < 0.5 * (np.mean(slowest[False]) - 1)
    assert max(slowest[True]) < max(slowest[False])


def test_balance_is_exact_arithmetic() -> None:
    """The largest first; neighbors by work in a micro-step; rows dealt forth and back."""
    work = np.array([[3.0, 9.0, 1.0, 7.0, 5.0, 8.0, 2.0, 6.0]])
    samples = np.arange(100, 108)[None]
    (dealt,) = balanced(samples, work, data_size=2, micro_batch_size=2).reshape(1, 2, 2, 2)
    works = work[0][dealt - 100]
    assert works.tolist() == [[[9, 6], [8, 7]], [[5, 1], [3, 2]]]


def test_masks_of_concatenated_documents(masked: Path) -> None:
    data = {"path": str(masked), "packing": "concatenate", "document_boundaries": "isolate"}
    config = config_for(data)
    with closing(open_training_data(config, BatchPlan(8, 8, 1, 1, LENGTH), 0)) as batches:
        (batch,) = batches.step(0)
    stream = [pair for document in documents_of(masked) for pair in zip(*document, strict=True)]
    rows = {
        tuple(token for token, _ in stream[low : low + LENGTH]): [
            (token if bit else -100) for token, bit in stream[low + 1 : low + LENGTH + 1]
        ]
        for low in range(0, len(stream) - LENGTH, LENGTH)
    }
    begins = 0
    for ids, labels in zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True):
        expected = rows[tuple(ids)]
        for token, label, wanted in zip(ids, labels, expected, strict=True):
            assert label == (-100 if token == 0 else wanted)
            begins += token == 0
    assert begins


def test_truncated_documents(plain: Path) -> None:
    config = config_for({"path": str(plain), "long_documents": "truncate"}, sequence_length=20)
    report = packing_reports(config, open_sources(config.data))[0]
    lengths = [len(tokens) for tokens, _ in documents_of(plain)]
    assert report.plan.counts.truncated_documents == sum(length > 21 for length in lengths)
    lost = sum(max(0, length - 21) for length in lengths)
    assert report.to_json()["truncated_fraction"] == pytest.approx(lost / sum(lengths))
    assert report.plan.counts.packed_tokens == sum(lengths) - lost
    assert "longer than a sample lose" in str(report)


def test_identity(plain: Path, masked: Path, tmp_path: Path) -> None:
    """Packed otherwise, or with another mask, a dataset is another one."""
    hashes = {
        identify_sources(config, open_sources(config.data))[0].hash
        for config in (
            config_for({"path": str(plain)}),
            config_for({"path": str(plain)}, sequence_length=24),
            config_for({"path": str(plain), "long_documents": "truncate"}),
            config_for({"path": str(plain), "packing": "concatenate"}),
            config_for({"path": str(plain), "packing": "none"}),
        )
    }
    assert len(hashes) == 5
    twin = write_dataset(tmp_path / "twin", vocab_size=97, seed=1, masked=True)
    config, same = config_for({"path": str(masked)}), config_for({"path": str(twin)})
    assert hash_of(config) == hash_of(same)
    tree = json.loads((twin / MANIFEST_NAME).read_text())
    tree["splits"]["train"][0]["mask_xxh3"] = "0" * 16
    (twin / MANIFEST_NAME).write_text(json.dumps(tree))
    assert hash_of(config) != hash_of(same)


def test_conversations_that_would_see_each_other_are_refused(masked: Path, plain: Path) -> None:
    concatenated = config_for({"path": str(masked), "packing": "concatenate"})
    (problem,) = check_datasets(concatenated, open_sources(concatenated.data)).problems
    assert str(problem) == (
        f"data.packing = 'concatenate': conversations ({masked}) would be split wherever a sample "
        "is full, and see each other -> set data.packing=best_fit (or at least "
        "data.document_boundaries=isolate)"
    )
    assert problems_of({"path": str(masked)}) == []
    assert problems_of({"path": str(masked), "packing": "none"}) == []
    assert problems_of({"path": str(plain), "packing": "concatenate"}) == []


def test_too_few_documents(plain: Path) -> None:
    config = config_for({"path": str(plain)}, global_batch_size=1000)
    (problem,) = check_datasets(config, open_sources(config.data)).problems
    assert "too short for one global batch" in str(problem)
    (report, *_) = packing_reports(config, open_sources(config.data))
    assert f"are {report.plan.num_packs} samples of 48 tokens" in str(problem)


def test_corrupt_index(plain: Path, tmp_path: Path) -> None:
    copy = write_dataset(tmp_path / "copy", vocab_size=97)
    index = copy / "train_00000.idx"
    content = bytearray(index.read_bytes())
    content[-8:] = np.array([10**6], "<i8").tobytes()
    index.write_bytes(content)
    (problem,) = problems_of({"path": str(copy)})
    assert "train_00000.idx is corrupt: the checksum of bytes 0 to " in str(problem)


@pytest.fixture
def opened(tmp_path: Path) -> TokenDataset:
    return open_dataset(write_dataset(tmp_path / "set", vocab_size=97, masked=True))


@pytest.mark.parametrize("damage", ["row_ends", "starts", "lengths"])
def test_corrupt_plan(opened: TokenDataset, damage: str) -> None:
    plan = open_plan(opened, "train", LENGTH, "cut")
    assert plan.path is not None
    content = bytearray(plan.path.read_bytes())
    ends, starts = 8 * plan.num_packs, 8 * len(plan.starts)
    offset = len(content) - 4 * len(plan.starts)
    if damage == "starts":
        offset -= starts
    elif damage == "row_ends":
        offset -= starts + ends
    content[offset : offset + 4] = (2**31 - 1).to_bytes(4, "little")
    plan.path.write_bytes(content)
    config = config_for({"path": str(opened.path)})
    samples = plan.num_packs
    with closing(open_training_data(config, BatchPlan(samples, samples, 1, 1, LENGTH), 0)) as data:
        with pytest.raises(DataError, match=rf"the packing plan {plan.path} is corrupt -> remove"):
            data.step(0)


def test_a_shortened_mask_is_found(opened: TokenDataset) -> None:
    samples = packed_documents(config_for({"path": str(opened.path)}), opened, "train")
    (opened.path / "train_00000.mask").write_bytes(b"")
    config = config_for({"path": str(opened.path)})
    with pytest.raises(DataError, match=r"train_00000\.mask is corrupt: 0 bytes"):
        open_training_data(config, BatchPlan(4, 4, 1, 1, LENGTH), 0)
    starts, lengths = np.array([0]), np.array([20])
    with pytest.raises(DataError, match=r"train_00000\.mask ends at byte 0"):
        samples.stream.read_mask(starts, lengths, np.ones(20, bool), np.array([0]))


def test_no_document_with_a_target(opened: TokenDataset) -> None:
    forget_blocks(opened.path)
    mask = opened.path / "train_00000.mask"
    mask.write_bytes(bytes(mask.stat().st_size))
    manifest = opened.path / "manifest.json"
    listed = opened.manifest.splits["train"][0].mask_xxh3
    assert listed is not None
    manifest.write_text(manifest.read_text().replace(listed, file_checksum(mask)))
    opened = open_dataset(opened.path)
    with pytest.raises(
        DataError, match=r"no document has a target: .* pieces without a target drop"
    ):
        packed_documents(config_for({"path": str(opened.path)}), opened, "train")
