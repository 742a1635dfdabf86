"""Samples joined of what an epoch has left: their tokens, labels and documents, in any division."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bigtrain.data.loading import loader
from bigtrain.data.loading.loader import open_training_data
from bigtrain.data.samples.mixture import MixedSamples
from bigtrain.data.samples.phases import (
    JoinedWindows,
    Phase,
    first_phase,
    identify_sources,
    next_phase,
)
from bigtrain.data.samples.token_stream import split_stream
from bigtrain.data.shards.dataset import TokenDataset, open_sources
from bigtrain.errors import DataError
from bigtrain.settings.batch_plan import BatchPlan
from bigtrain.settings.run_config import RunConfig
from tests.support.datasets import END_OF_DOCUMENT, forget_blocks, write_dataset
from tests.support.run_trees import llama, run_config

OLD, NEW, GLOBAL, READ = 8, 20, 12, 60


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("datasets")
    return [
        write_dataset(root / "plain", vocab_size=50, num_documents=40),
        write_dataset(root / "masked", vocab_size=50, num_documents=20, seed=1, masked=True),
    ]


def config(paths: list[Path], length: int, **data: Any) -> RunConfig:
    sources = [{"path": str(path), "weight": 3 - n} for n, path in enumerate(paths)]
    data = {"sources": sources, "document_boundaries": "isolate", **data}
    batch = {"sequence_length": length, "global_batch_size": GLOBAL}
    return run_config(model=llama(50), data=data, batch=batch)


def longer(paths: list[Path], **data: Any) -> tuple[RunConfig, Phase, tuple[TokenDataset, ...]]:
    """A run that goes on with `NEW` after `READ` samples of `OLD`."""
    before, now = config(paths, OLD, **data), config(paths, NEW, **data)
    datasets = open_sources(now.data)
    phase = first_phase(before, identify_sources(before, datasets))
    return now, next_phase(phase, now, identify_sources(now, datasets), READ), datasets


Row = tuple[list[int], list[int], list[int]]


def expected(phase: Phase, datasets: tuple[TokenDataset, ...], isolate: bool) -> list[Row]:
    """Inputs, labels and positions of each joined sample, source after source, token by token."""
    rows = []
    for source, dataset in zip(phase.read_sources, datasets, strict=True):
        assert source.rest is not None
        (shard,) = dataset.shards("train")
        tokens, targets = shard.tokens.tolist(), [True] * shard.num_tokens
        if shard.mask_path is not None:
            bits = np.unpackbits(shard.mask_bytes, bitorder="little")
            targets = bits[: shard.num_tokens].astype(bool).tolist()
        count = np.arange(phase.num_joined(source))
        pieces = source.rest.pieces(count, source.num_tokens, NEW, 0, source.number)
        for sample in count:
            own = pieces.numbers == sample
            inputs: list[int] = []
            labels: list[int] = []
            positions: list[int] = []
            for start, length in zip(pieces.starts[own], pieces.lengths[own], strict=True):
                is_last = len(inputs) + length > NEW
                stop = int(start + length) - is_last
                for place in range(int(start), stop):
                    goes_on = not (isolate and tokens[place] == END_OF_DOCUMENT)
                    inside = place + 1 < stop or is_last
                    is_target = goes_on and inside and targets[place + 1]
                    begins = place == start or (isolate and tokens[place - 1] == END_OF_DOCUMENT)
                    inputs.append(tokens[place])
                    labels.append(tokens[place + 1] if is_target else -100)
                    positions.append(0 if begins else positions[-1] + 1)
            rows.append((inputs, labels, positions))
    return rows


@pytest.mark.parametrize("isolate", [True, False])
def test_joined_samples_are_their_pieces_in_any_division(
    paths: list[Path], isolate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "STEPS_AT_ONCE", 2)  # of 64 steps few are asked for here
    boundaries = "isolate" if isolate else "ignore"
    run, phase, datasets = longer(paths, document_boundaries=boundaries)
    wanted = expected(phase, datasets, isolate)
    assert len(wanted) > 30
    order = phase.order(run.seed)
    reached = 0
    divisions = ((1, 12, 8), (4, 1, 2), (3, 2, 2)) if isolate else ((2, 3, 8), (12, 1, 3))
    for data_size, micro, steps in divisions:
        for rank in range(data_size):
            plan = BatchPlan(GLOBAL, micro, data_size, GLOBAL // (data_size * micro), NEW)
            with closing(open_training_data(run, plan, rank, phase)) as batches:
                mixed = batches.dataset
                assert isinstance(mixed, MixedSamples)
                sizes = [source.num_samples for source in mixed.sources]
                for step in range(steps):
                    first = READ + step * GLOBAL
                    samples = order.windows(first, GLOBAL).reshape(-1, data_size, micro)[:, rank]
                    for own, batch in zip(samples, batches.step(first), strict=True):
                        for row, sample in enumerate(own.tolist()):
                            number = joined_number(phase, sizes, sample)
                            if number is None:
                                continue
                            inputs, labels, positions = wanted[number]
                            assert batch.input_ids[row].tolist() == inputs
                            assert batch.labels[row].tolist() == labels
                            if isolate:
                                assert batch.position_ids is not None
                                assert batch.position_ids[row].tolist() == positions
                            reached += 1
    assert reached > 100


def joined_number(phase: Phase, sizes: list[int], sample: int) -> int | None:
    """Which of the joined samples of all sources a sample of the mixture is."""
    before = 0
    for source, size in zip(phase.read_sources, sizes, strict=True):
        num_joined = phase.num_joined(source)
        if sample < size:
            own = sample - (size - num_joined)
            return before + own if own >= 0 else None
        sample -= size
        before += num_joined
    raise AssertionError


def test_a_corrupt_piece_is_named(paths: list[Path], tmp_path: Path) -> None:
    copy = forget_blocks(write_dataset(tmp_path / "copy", vocab_size=50, num_documents=40))
    run, phase, datasets = longer([copy])
    (source,) = phase.read_sources
    assert source.rest is not None
    pieces = source.rest.pieces(np.array([0]), source.num_tokens, NEW, run.seed, source.number)
    content = np.fromfile(copy / "train_00000.bin", "<u2")
    content[pieces.starts[1]] = 50
    (copy / "train_00000.bin").write_bytes(content.tobytes())
    plan = BatchPlan(GLOBAL, GLOBAL, 1, 1, NEW)
    with closing(open_training_data(run, plan, 0, phase)) as batches:
        with pytest.raises(DataError, match=r" and tokens .* are corrupt: one of them is"):
            batches.step(READ)
        assert isinstance(batches.dataset, MixedSamples)
        samples = batches.dataset.sources[0]
        assert isinstance(samples, JoinedWindows)
        first = samples.windows.num_samples
        begin, length = int(pieces.starts[0]), int(pieces.lengths[0])
        assert samples.describe(first).startswith(f"tokens {begin} to {begin + length} of ")
        assert samples.describe(0) == split_stream(datasets[0], "train").describe(0, NEW + 1)
