"""What is left out of the step of ZeRO 1 and 2 changes no bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from bigtrain.engine.deepspeed_patches import zero12_reduction
from bigtrain.engine.deepspeed_patches.reduction_plan import (
    OwnedRun,
    OwnerPlan,
    ReductionPlan,
    RunPiece,
    Slot,
    Target,
    owner_plan_of,
    plan_of,
)
from bigtrain.engine.startup.process_group import process_group
from bigtrain.system.world import World
from tests.support.lives import run_script
from tests.unit.engine.deepspeed_patches import zero12_training
from tests.unit.engine.deepspeed_patches.test_zero3_hooks import (
    Frozen,
    Recomputed,
    Reentrant,
    Stack,
)
from tests.unit.engine.deepspeed_patches.zero12_training import Sometimes, same_bits, train

TRAINING = Path(zero12_training.__file__)

# DeepSpeed imports its Muon, compiled by torch.jit, while it averages gradients.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with process_group(World(0, 1, 0)):
        yield


OPTIONS: list[dict[str, Any]] = [
    {"stage": 1},
    {"stage": 2, "reduce_bucket_size": 100},  # several buckets a step
    {"stage": 2, "dtype": "bf16", "sums": "fp32"},
    {"stage": 1, "dtype": "fp16", "sums": "fp32", "reduce_bucket_size": 100},
]


@pytest.mark.parametrize(
    ("make", "options"),
    [
        *((Stack, options) for options in OPTIONS[1:]),
        *((Recomputed, OPTIONS[0]), (Reentrant, OPTIONS[2]), (Frozen, OPTIONS[1])),
        *((Sometimes, options) for options in OPTIONS[:2]),
    ],
    ids=str,
)
def test_a_step_without_redundant_work_has_the_same_bits(
    make: Callable[[], Stack], options: dict[str, Any]
) -> None:
    theirs, _ = train(make, options, ours=False)
    tensors, replaced = train(make, options, ours=True)
    assert replaced
    assert len(tensors) == len(theirs) > 20
    assert all(same_bits(a, b) for a, b in zip(tensors, theirs, strict=True))


class Stream:
    """Notes what waits for it, and what it waits for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


class Streams:
    """A CPU as DeepSpeed sees a GPU: with two streams, which wait for nothing by themselves."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current, self.side = Stream("backward", self.log), Stream("reduction", self.log)

    def __getattr__(self, name: str) -> Any:
        return getattr(get_accelerator(), name)

    def resolves_data_dependency(self) -> bool:
        return False

    def current_stream(self) -> Stream:
        return self.current

    def synchronize(self) -> None:
        self.log.append("synchronize")

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        self.log.append(f"on {stream.name}")
        yield
        self.current = before


def test_streams_wait_for_each_other_as_with_two_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams()
    monkeypatch.setattr(zero12_reduction, "get_accelerator", lambda: streams)
    options = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 100}

    def prepare(optimizer: Any) -> None:
        optimizer.reduction_stream = streams.side

    theirs, _ = train(Stack, options, ours=False)
    tensors, replaced = train(Stack, options, ours=True, prepare=prepare)
    assert replaced
    assert all(same_bits(a, b) for a, b in zip(tensors, theirs, strict=True))
    reduction = ["backward waits for reduction", "reduction waits for backward", "on reduction"]
    passes = "; ".join(streams.log).split("; synchronize")
    assert passes.pop() == ""
    assert len(passes) == 10
    for said in passes:
        words = [word for word in said.split("; ") if word]
        assert words == reduction * (len(words) // 3)
        assert len(words) > 3  # several buckets


def test_gradients_of_other_streams_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As compiled layers may have them; their memory must outlive the stream that reads it."""
    streams, used = Streams(), []
    other = Stream("compiled", streams.log)
    monkeypatch.setattr(zero12_reduction, "get_accelerator", lambda: streams)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, stream: used.append(stream))

    def prepare(optimizer: Any) -> None:
        for parameter in optimizer.bit16_groups[0][::2]:  # before DeepSpeed's hooks run
            parameter.register_hook(lambda _: setattr(streams, "current", other))
        for parameter in optimizer.bit16_groups[0][1::2]:
            parameter.register_hook(lambda _: setattr(streams, "current", main))

    main = streams.current
    theirs, _ = train(Stack, {"stage": 2}, ours=False)
    tensors, _ = train(Stack, {"stage": 2}, ours=True, prepare=prepare)
    assert all(same_bits(a, b) for a, b in zip(tensors, theirs, strict=True))
    assert len(streams.log) == 10
    assert set(streams.log) <= {"backward waits for compiled", "compiled waits for backward"}
    assert len(used) == 10 * len(list(Stack().parameters()))
    assert set(used) <= {main, other}


@pytest.mark.slow
def test_three_ranks_have_the_same_bits() -> None:
    assert run_script(3, TRAINING).count("same bits") == 3


def slot(group: int, size: int, *shares: int, own: tuple[int, int, int] = (0, 0, 0)) -> Slot:
    """own: where it begins in the parameter and in the partition, and how many elements."""
    return Slot(None, group, size, list(shares) or [size], *own)


def test_a_bucket_is_cut_into_what_partitions_take() -> None:
    """Backward order: the last parameter of a group comes first; of `far` and of the end of
    `shared` another rank is the owner."""
    last, shared = slot(0, 5, own=(0, 7, 5)), slot(0, 6, 4, 2, own=(4, 5, 2))
    first, far, other = slot(0, 5, own=(0, 0, 5)), slot(0, 3), slot(1, 2, own=(0, 1, 2))
    slots = [far, last, shared, other, first]
    assert plan_of(slots, 100) == ReductionPlan(
        slots,
        reduced=[21],
        pieces=[3, 5, 4, 2, 2, 5],
        targets=[Target(0, 0, 12, [5, 3, 1], [4, 2, 1]), Target(1, 1, 2, [4], [3])],
    )


def test_each_element_is_summed_at_its_owner() -> None:
    """In few runs, which are in the order of the partitions."""
    before, shared, last = (Slot(None, 0, size, [size], offset=at) for size, at in
                            ((5, 0), (4, 5), (3, 9)))  # fmt: skip
    other = Slot(None, 1, 2, [2], offset=1)
    slots = [last, other, shared]  # `before` comes in the next bucket
    assert owner_plan_of(slots, [6, 2]) == OwnerPlan(
        slots,
        [
            OwnedRun(0, 0, 5, 1, [RunPiece(2, 0, 1)]),
            OwnedRun(0, 1, 0, 6, [RunPiece(2, 1, 3), RunPiece(0, 0, 3)]),
            OwnedRun(1, 0, 1, 1, [RunPiece(1, 0, 1)]),
            OwnedRun(1, 1, 0, 1, [RunPiece(1, 1, 1)]),
        ],
    )
    assert owner_plan_of([before], [6, 2]).runs == [OwnedRun(0, 0, 0, 5, [RunPiece(0, 0, 5)])]


def test_parameters_in_the_order_of_their_partition_are_one_piece() -> None:
    slots = [slot(0, 5, own=(2, 0, 3)), slot(0, 4, own=(0, 3, 4)), slot(1, 4, own=(0, 0, 4))]
    plan = plan_of(slots, 13)
    assert (plan.pieces, plan.reduced) == ([2, 7, 4], [13])
    assert plan.targets == [Target(0, 0, 7, [1], [0, 1]), Target(1, 0, 4, [2], [2])]


def test_a_parameter_larger_than_a_bucket_is_reduced_in_parts_as_its_owners_have_it() -> None:
    alone = slot(0, 40, 8, 7, 7, 18, own=(8, 0, 7))
    plan = plan_of([alone], 10)
    assert plan.reduced == [15, 25]  # 8 + 7 is the first sum above 10, then 7 + 18
    assert (plan.pieces, plan.targets) == ([8, 7, 25], [Target(0, 0, 7, [1], [0])])
