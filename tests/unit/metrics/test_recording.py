"""Metrics that user code records: sums of a rank, and all ranks together."""

from __future__ import annotations

import pytest
import torch

from bigtrain.metrics.recording import Recorded, Recorder, joined, record


def test_each_reduction_joins_steps_and_ranks() -> None:
    ranks = []
    for values in ([1.0, 2.0], [6.0], []):
        recorder = Recorder()
        with recorder.collecting():
            for value in values:
                record("mean", value)
                record("sum", torch.tensor([value]), "sum")
                record("max", value, "max")
                record("min", torch.tensor(value), "min")
                record("weighted", value, weight=value)
        ranks.append(recorder.take())
        assert recorder.take() == {}
    assert joined(ranks) == {"max": 6, "mean": 3, "min": 1, "sum": 9, "weighted": 41 / 9}
    assert joined([{}]) == {}


def test_outside_a_run_nothing_is_recorded() -> None:
    record("x", 1.0)
    recorder = Recorder()
    with recorder.collecting():
        pass
    record("x", 1.0)
    assert recorder.take() == {}


def test_a_tensor_with_a_graph_is_recorded_without_it() -> None:
    recorder = Recorder()
    with recorder.collecting():
        record("x", torch.ones((), requires_grad=True) * 2)
    assert recorder.take() == {"x": Recorded("mean", 2.0, 1.0)}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("x", 1.0, "median"), "reduce = 'median' is not one of"),
        (("", 1.0), "a name has letters"),
        (("a b", 1.0), "a name has letters"),
        (("x", "no"), "str is not a number"),
        (("x", torch.zeros(2)), r"a tensor of shape \[2\] is not one number"),
        (("x", 1.0, "mean", 0.0), "weight = 0.0 is not a positive number"),
        (("before", 1.0, "max"), "reduce = 'max', and before it was 'mean'"),
    ],
)
def test_what_cannot_be_recorded(arguments: tuple[object, ...], text: str) -> None:
    recorder = Recorder()
    with recorder.collecting():
        record("before", 1.0)
        with pytest.raises(ValueError, match=text):
            record(*arguments)  # type: ignore[arg-type]


def test_ranks_that_reduce_in_different_ways() -> None:
    with pytest.raises(ValueError, match="reduce = 'sum' on rank 1, and 'mean' on another"):
        joined([{"x": Recorded("mean", 1, 1)}, {"x": Recorded("sum", 1, 1)}])
