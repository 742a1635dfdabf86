"""Laws of a mixture: proportions, no gap and no repeat in a source's epoch, one order for all."""

from __future__ import annotations

from contextlib import closing
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigtrain.data.loading.loader import open_held_out, open_training_data
from bigtrain.data.samples import mixture as mixture_module
from bigtrain.data.samples.mixture import (
    BLOCK_SAMPLES,
    MixedSamples,
    MixtureOrder,
    apportion,
    integer_weights,
)
from bigtrain.data.samples.phases import data_hash
from bigtrain.data.samples.shuffle import SampleOrder
from bigtrain.data.samples.token_stream import TokenRows
from bigtrain.data.shards.dataset import open_sources
from bigtrain.settings.batch_plan import BatchPlan
from bigtrain.settings.run_config import RunConfig, SourceSection
from tests.support.datasets import write_dataset
from tests.support.run_trees import llama, run_config
from tests.support.tiers import examples

LENGTH = 4
FIRST_OF_A_MIXTURE = [3, 15, 8, 14, 4, 7, 5, 11, 13, 10]

weight_lists = st.lists(st.integers(1, 10**6), min_size=1, max_size=8)
seeds = st.integers(0, 2**64)


def mixture(sizes: list[int], weights: list[int], seed: int) -> MixtureOrder:
    """Sources of a run from its beginning."""
    orders = [SampleOrder(size, seed, number) for number, size in enumerate(sizes)]
    return MixtureOrder(orders, weights, seed)


def seat_by_seat(weights: list[int], seats: int) -> list[int]:
    """The definition: every seat to the largest weight / (2 count + 1), the first among equals."""
    counts = [0] * len(weights)
    for _ in range(seats):
        ratios = [Fraction(w, 2 * c + 1) for w, c in zip(weights, counts, strict=True)]
        counts[ratios.index(max(ratios))] += 1
    return counts


@settings(max_examples=examples(200))
@given(weights=st.lists(st.integers(1, 9), min_size=1, max_size=6), seats=st.integers(0, 60))
def test_apportionment_is_websters(weights: list[int], seats: int) -> None:
    assert apportion(weights, seats) == seat_by_seat(weights, seats)


@settings(max_examples=examples(300))
@given(weights=weight_lists, block=st.integers(0, 10**12))
def test_quotas_are_monotone_and_near_the_shares(weights: list[int], block: int) -> None:
    before = apportion(weights, block * BLOCK_SAMPLES)
    after = apportion(weights, (block + 1) * BLOCK_SAMPLES)
    assert sum(before) == block * BLOCK_SAMPLES
    assert all(low <= high for low, high in zip(before, after, strict=True))
    for weight, count in zip(weights, before, strict=True):
        share = Fraction(weight, sum(weights)) * block * BLOCK_SAMPLES
        assert abs(count - share) <= Fraction(1 + len(weights), 2)


@settings(max_examples=examples(40))
@given(
    sizes=st.lists(st.integers(1, 125), min_size=1, max_size=5),
    raw=st.lists(st.integers(1, 50), min_size=5, max_size=5),
    seed=seeds,
)
def test_no_source_repeats_or_leaves_out_within_its_epoch(
    sizes: list[int], raw: list[int], seed: int
) -> None:
    weights = raw[: len(sizes)]
    order = mixture(sizes, weights, seed)
    num_samples = 256
    with pytest.MonkeyPatch.context() as patched:
        # A source of one sample has an epoch for each: two of the usual blocks are thousands.
        patched.setattr(mixture_module, "BLOCK_SAMPLES", num_samples // 2)
        windows = order.windows(0, num_samples)
    quotas = apportion(weights, num_samples)
    offset = 0
    for size, quota in zip(sizes, quotas, strict=True):
        own = windows[(windows >= offset) & (windows < offset + size)] - offset
        assert len(own) == quota
        whole, begun = np.split(own, [len(own) // size * size])
        assert (np.sort(whole.reshape(-1, size), axis=1) == np.arange(size)).all()
        assert len(set(begun.tolist())) == len(begun)
        offset += size


@settings(max_examples=examples(40))
@given(seed=seeds, first=st.integers(0, 10**13), cuts=st.lists(st.integers(0, 1500), max_size=5))
def test_any_division_of_the_range_is_the_same_order(
    seed: int, first: int, cuts: list[int]
) -> None:
    sizes, weights = [900, 10**9, 70], [7, 12, 1]
    position, parts = first, [np.empty(0, np.int64)]
    for count in cuts:
        parts.append(mixture(sizes, weights, seed).windows(position, count))
        position += count
    whole = mixture(sizes, weights, seed).windows(first, position - first)
    assert np.concatenate(parts).tolist() == whole.tolist()


@settings(max_examples=examples(40))
@given(
    size=st.integers(1, 5000), seed=seeds, first=st.integers(0, 20_000), count=st.integers(0, 3000)
)
def test_one_source_is_the_order_without_a_mixture(
    size: int, seed: int, first: int, count: int
) -> None:
    alone = SampleOrder(size, seed).windows(first, count)
    assert mixture([size], [3], seed).windows(first, count).tolist() == alone.tolist()


def test_sources_are_mixed_inside_a_block() -> None:
    """As often before as after each other: the sum of ranks of a random arrangement."""
    windows = mixture([10**6, 10**6], [3, 1], 5).windows(0, 100 * BLOCK_SAMPLES)
    second = (windows >= 10**6).reshape(100, BLOCK_SAMPLES)
    assert second.sum(axis=1).tolist() == [256] * 100
    places = np.flatnonzero(second) % BLOCK_SAMPLES
    spread = BLOCK_SAMPLES / np.sqrt(12 * len(places))
    assert abs(places.mean() - (BLOCK_SAMPLES - 1) / 2) < 5 * spread
    assert len({tuple(row) for row in second.tolist()}) == 100


def test_sources_of_the_same_size_have_orders_of_their_own() -> None:
    windows = mixture([500, 500], [1, 1], 5).windows(0, 1000)
    first, second = windows[windows < 500], windows[windows >= 500] - 500
    assert first.tolist()[:100] != second.tolist()[:100]


def test_the_order_stays_as_it_is() -> None:
    """Written down once: a resumed run must read what the run before did not."""
    order = mixture([10, 6], [2, 1], 7)
    assert order.windows(0, 10).tolist() == FIRST_OF_A_MIXTURE


def test_weights_are_what_they_say() -> None:
    def of(kind: str, *values: float, sizes: tuple[int, ...] = (1, 1, 1)) -> list[int]:
        sections = [SourceSection(path="p", **{kind: value}) for value in values]
        return integer_weights(sections, sizes[: len(values)])

    assert of("weight", 0.1, 0.3) == [1, 3]
    assert of("weight", 2, 4, 6) == [1, 2, 3]
    assert of("weight", 1e-9, 1.0) == [1, 10**9]
    assert of("epochs", 2, 1, 0.5, sizes=(100, 700, 200)) == [2, 7, 1]


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("mixture")
    return [
        write_dataset(root / f"d{n}", vocab_size=50, num_documents=40 * (n + 1), seed=n)
        for n in range(3)
    ]


def config_for(data: dict[str, Any]) -> RunConfig:
    batch = {"sequence_length": LENGTH, "micro_batch_size": 2}
    return run_config(model=llama(50), data=data, batch=batch, evaluation={"samples": 10_000})


def hash_of(data: dict[str, Any]) -> str:
    section = config_for(data).data
    return data_hash(section, open_sources(section))


def sources(datasets: list[Path], *weights: float) -> dict[str, Any]:
    return {
        "sources": [
            {"path": str(path), "weight": weight}
            for path, weight in zip(datasets, weights, strict=False)
        ]
    }


def test_from_a_run_configuration(datasets: list[Path]) -> None:
    plan = BatchPlan(4, 2, 1, 2, LENGTH)
    config = config_for(sources(datasets, 1, 2, 1))
    with closing(open_training_data(config, plan, 0)) as batches:
        assert isinstance(batches.dataset, MixedSamples)
        assert len(batches.dataset.sources) == 3
        order = batches.order.windows(0, 4)
        rows = TokenRows(np.zeros((4, LENGTH + 1), batches.dataset.token_dtype))
        batches.dataset.fill(order, np.arange(4), rows)
        read = [row for batch in batches.step(0) for row in batch.input_ids.tolist()]
        assert read == rows.tokens[:, :-1].tolist()
    held_out = open_held_out(config, plan, 0)
    assert [(source.name, source.weight) for source in held_out] == [
        ("d0", 1),
        ("d1", 2),
        ("d2", 1),
    ]
    for source, path in zip(held_out, datasets, strict=True):
        (alone,) = open_held_out(config_for({"path": str(path)}), plan, 0)
        assert [batch.input_ids.tolist() for batch in source.batches] == [
            batch.input_ids.tolist() for batch in alone.batches
        ]


def test_names_of_sources() -> None:
    def names(*sources: dict[str, Any]) -> tuple[str, ...]:
        return config_for({"sources": [{"weight": 1, **source} for source in sources]}).data.names

    assert config_for({"path": "a/shards/"}).data.names == ("shards",)
    assert names({"path": "x/a"}, {"path": "y/b"}) == ("a", "b")
    assert names({"path": "x/a"}, {"path": "y/a"}, {"path": "c"}) == ("x/a", "y/a", "c")
    assert names({"path": "x/a", "name": "first"}, {"path": "y/a"}) == ("first", "y/a")
    with pytest.raises(ValueError, match="two sources have the same name"):
        names({"path": "a"}, {"path": "b", "name": "a"})


def test_one_source_is_the_same_run_as_a_path(datasets: list[Path]) -> None:
    path, mixture = {"path": str(datasets[0])}, sources(datasets[:1], 0.3)
    plan = BatchPlan(4, 2, 1, 2, LENGTH)
    steps = []
    for data in (path, mixture):
        with closing(open_training_data(config_for(data), plan, 0)) as batches:
            steps.append([batch.input_ids.tolist() for batch in batches.step(8)])
    assert steps[0] == steps[1]
    assert hash_of(path) == hash_of(mixture)


def test_the_data_hash_covers_sources_and_weights(datasets: list[Path]) -> None:
    variants = [
        sources(datasets, 1, 2, 1),
        sources(datasets, 1, 2, 2),
        sources(datasets[:2], 1, 2),
        sources(datasets[::-1], 1, 2, 1),
        {"sources": [{"path": str(path), "epochs": 1} for path in datasets]},
    ]
    hashes = {hash_of(data) for data in variants}
    assert len(hashes) == len(variants)
