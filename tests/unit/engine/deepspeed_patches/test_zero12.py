"""What is left out of the step of ZeRO 1 and 2 changes no bit; parameters are made views of their
flat tensor again only where they are not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.utils import count_used_parameters_in_backward
from deepspeed.runtime.zero import stage_1_and_2
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from bigtrain.engine.deepspeed_patches import zero12_reduction
from bigtrain.engine.deepspeed_patches.host_time import HostTime
from bigtrain.engine.deepspeed_patches.reduction_plan import ReductionPlan, Slot, Target, plan_of
from bigtrain.engine.deepspeed_patches.startup import restore_process_state
from bigtrain.engine.deepspeed_patches.zero12 import (
    NORM_CHUNK,
    _UsedParameters,
    keep_accumulating_nodes,
    keep_views,
    skip_redundant_work_of_zero12,
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


class Group:
    """One group of two parameters, in a flat tensor as DeepSpeed has it."""

    def __init__(self) -> None:
        parameters = [torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(4))]
        self.calls = 0
        self.optimizer: Any = SimpleNamespace(
            bit16_groups=[parameters],
            bit16_groups_flat=[torch.arange(10.0)],
            round_robin_bit16_groups=[parameters[::-1]],
            round_robin_bit16_meta=[[torch.empty(4), torch.empty(2, 3)]],
            round_robin_bit16_offsets=[[0, 4]],
            round_robin_bit16_indices=[[1, 0]],
            _update_model_bit16_weights=self.update,
        )

    def update(self, group_index: int) -> None:
        self.calls += 1
        DeepSpeedZeroOptimizer._update_model_bit16_weights(self.optimizer, group_index)

    def values(self) -> list[list[float]]:
        return [p.detach().flatten().tolist() for p in self.optimizer.bit16_groups[0]]


def test_views_are_made_once_and_follow_the_flat_tensor() -> None:
    group = Group()
    keep_views(group.optimizer)
    for _ in range(3):
        group.optimizer._update_model_bit16_weights(0)
    assert group.calls == 1
    assert group.values() == [[4, 5, 6, 7, 8, 9], [0, 1, 2, 3]]
    group.optimizer.bit16_groups_flat[0].add_(1.0)  # an update
    group.optimizer._update_model_bit16_weights(0)
    assert group.calls == 1
    assert group.values() == [[5, 6, 7, 8, 9, 10], [1, 2, 3, 4]]


def test_views_are_made_again_where_the_flat_tensor_or_a_parameter_has_moved() -> None:
    group = Group()
    keep_views(group.optimizer)
    group.optimizer._update_model_bit16_weights(0)
    group.optimizer.bit16_groups_flat[0].data = torch.arange(10.0) + 20.0  # as offloading does
    group.optimizer._update_model_bit16_weights(0)
    assert group.values() == [[24, 25, 26, 27, 28, 29], [20, 21, 22, 23]]
    group.optimizer.bit16_groups_flat[0] = torch.arange(10.0) + 40.0
    group.optimizer._update_model_bit16_weights(0)
    assert group.values() == [[44, 45, 46, 47, 48, 49], [40, 41, 42, 43]]
    group.optimizer.bit16_groups[0][1].data = torch.zeros(4)
    group.optimizer._update_model_bit16_weights(0)
    assert group.values() == [[44, 45, 46, 47, 48, 49], [40, 41, 42, 43]]
    assert group.calls == 4


def test_other_optimizers_stay_as_they_are() -> None:
    other = SimpleNamespace(report_ipg_memory_usage=len)
    skip_redundant_work_of_zero12(other, HostTime())
    assert vars(other) == {"report_ipg_memory_usage": len}


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


class Wide(torch.nn.Module):
    """One weight that is larger than the parts that norms are taken of."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, NORM_CHUNK + 8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return (tokens.float().mean().expand(1, 2) @ self.weight).square().mean()


def test_one_rank_copies_each_gradient_once_and_each_parameter_once() -> None:
    """Passes over memory are what ZeRO 1 costs a CPU: the gradient into the flat tensor and the
    master into the parameter, but no zeros, bucket or gradient in float64."""
    profile = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    )
    train(Wide, {"stage": 1}, ours=True, prepare=lambda _: profile.start())
    profile.stop()
    size = Wide().weight.numel()
    names = [
        event.name
        for event in profile.events()
        if event.name in ("aten::cat", "aten::copy_", "aten::fill_")
        and any(math.prod(shape) > size / 2 for shape in event.input_shapes if shape)
    ]
    steps = zero12_training.PASSES // 2
    # AdamW fills two moments once, and `train` copies the result.
    assert Counter(names) == {"aten::cat": steps, "aten::copy_": steps + 1, "aten::fill_": 2}


@pytest.mark.parametrize("is_device", [False, True])
def test_a_cpu_keeps_the_memory_of_gradients_and_a_device_does_not(
    is_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates: list[torch.Tensor] = []  # which stay in memory, so that nothing takes their place

    def prepare(optimizer: Any) -> None:
        clip = optimizer.unscale_and_clip_grads

        def note(gradients: list[torch.Tensor], norm: Any) -> None:
            updates.extend(gradients)
            clip(gradients, norm)

        optimizer.unscale_and_clip_grads = note

    if is_device:
        monkeypatch.setattr(zero12_reduction, "get_accelerator", Streams)
    train(Stack, {"stage": 1}, ours=True, prepare=prepare)
    num_places = len({gradient.data_ptr() for gradient in updates})
    assert num_places == (len(updates) if is_device else 1)
    assert len(updates) == zero12_training.PASSES // 2


def test_norms_in_chunks_are_those_of_full_gradients() -> None:
    wide, _ = train(Wide, {"stage": 1}, ours=True)
    theirs, _ = train(Wide, {"stage": 1}, ours=False)
    assert all(same_bits(a, b) for a, b in zip(wide, theirs, strict=True))


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


def test_parameters_that_take_part_are_counted_as_before() -> None:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    parameters = [*weights, frozen]
    count = _UsedParameters()
    counts: list[tuple[int, int]] = []

    def look(_gradient: torch.Tensor) -> None:
        counts.append((count(parameters), count_used_parameters_in_backward(parameters)))

    for used in (weights[:2], weights, weights[:1]):
        total = sum(weight.sum() for weight in used)
        assert isinstance(total, torch.Tensor)
        total.register_hook(look)
        total.backward()
    for weight in weights:  # as a device that is changed does
        weight.grad = None
        weight.data = weight.data.double()
    total = weights[0].sum() + weights[1].sum()
    total.register_hook(look)
    total.backward()
    frozen.requires_grad_(True)  # trained from here on
    total = weights[0].sum() + frozen.sum()
    total.register_hook(look)
    total.backward()
    assert counts == [(2, 2), (3, 3), (1, 1), (2, 2), (2, 2)]


def test_what_holds_parameters_ends_with_the_process_group() -> None:
    before = stage_1_and_2.count_used_parameters_in_backward
    with restore_process_state():
        keep_accumulating_nodes()
        assert isinstance(stage_1_and_2.count_used_parameters_in_backward, _UsedParameters)
    assert stage_1_and_2.count_used_parameters_in_backward is before


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
        targets=[Target(0, 0, 12, [5, 3, 1]), Target(1, 1, 2, [4])],
    )


def test_parameters_in_the_order_of_their_partition_are_one_piece() -> None:
    slots = [slot(0, 5, own=(2, 0, 3)), slot(0, 4, own=(0, 3, 4)), slot(1, 4, own=(0, 0, 4))]
    plan = plan_of(slots, 13)
    assert (plan.pieces, plan.reduced) == ([2, 7, 4], [13])
    assert plan.targets == [Target(0, 0, 7, [1]), Target(1, 0, 4, [2])]


def test_a_parameter_larger_than_a_bucket_is_reduced_in_parts_as_its_owners_have_it() -> None:
    alone = slot(0, 40, 8, 7, 7, 18, own=(8, 0, 7))
    plan = plan_of([alone], 10)
    assert plan.reduced == [15, 25]  # 8 + 7 is the first sum above 10, then 7 + 18
    assert (plan.pieces, plan.targets) == ([8, 7, 25], [Target(0, 0, 7, [1])])
