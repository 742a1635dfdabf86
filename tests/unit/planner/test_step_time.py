"""Seconds: kernels by their tiles, collectives by their rings, pipelines by their slowest stage."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from bigtrain.planner.layout import Layout, OptimizerCosts
from bigtrain.planner.model_costs import Attention, DenseShape, Matmul, ModelCosts, closed_form
from bigtrain.planner.seconds.communication import DIRECT, Group, place
from bigtrain.planner.seconds.kernels import (
    RankShare,
    attention_seconds,
    cast_bytes,
    matmul_seconds,
)
from bigtrain.planner.stages import matrix_exchange, stage_layers, stages_of
from bigtrain.planner.step_time import StepTime, step_time
from bigtrain.planner.tables.engines import MeasuredEngine, ZeroCosts, engine_named
from bigtrain.planner.tables.hardware import Device, Reach, find_device
from bigtrain.settings.fast_path import LossKernels

IDEAL = Reach(1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0)
A100 = replace(find_device("A100-80GB"), reach=IDEAL)
ENGINE = replace(
    engine_named("deepspeed"), kernel_host_seconds=0.0, parameter_host_seconds=0.0,
    step_seconds=0.0, slowdown=0.0, overlap=0.0,
)  # fmt: skip
MODEL = closed_form(DenseShape(8, 4096, 32, 8, 14336, 32000))


def time_of(model: ModelCosts = MODEL, **changes: Any) -> StepTime:
    layout = replace(Layout(sequence_length=2048), **changes)
    return step_time(model, layout, A100, ENGINE)


def test_a_wave_more_takes_as_long_as_a_full_one() -> None:
    """108 multiprocessors: 108 tiles of 256 x 128 take one wave, one more takes two."""
    full = matmul_seconds(A100, 256, 4096, 108 * 128, 2)
    assert full == pytest.approx(2 * 256 * 4096 * 108 * 128 / 312e12)
    more = matmul_seconds(A100, 256, 4096, 109 * 128, 2)
    assert 1.05 < more / full <= 2


def test_thin_products_are_bound_by_memory() -> None:
    moved = 2 * (1024 + 1024 * 13824 + 13824)
    assert matmul_seconds(A100, 1, 1024, 13824, 2) == pytest.approx(moved / A100.memory_bandwidth)
    # Four tiles of 64 x 128 on 108 multiprocessors: 16 take 512 of a tile's 8,192 rows each.
    shared = 2 * 64 * 128 * 512 * 108 / (0.7 * 312e12)
    assert matmul_seconds(A100, 256, 8192, 128, 2) == pytest.approx(shared)


def test_attention_looks_at_half_of_the_pairs_or_at_a_window() -> None:
    heads = Attention(32, 8, 128, 128)
    forward, backward = attention_seconds(A100, heads, 1, 8192, num_ranks=1, score_passes=None)
    assert forward == pytest.approx(2 * 8192**2 * 32 * 128 / 312e12)
    assert backward == pytest.approx(2.5 * forward)
    narrow = replace(heads, window=1024)
    assert attention_seconds(
        A100, narrow, 1, 8192, num_ranks=1, score_passes=None
    ).forward == pytest.approx(forward / 4)


def test_rings_move_their_share_twice_for_a_sum() -> None:
    for size, share in ((2, 0.5), (8, 7 / 8)):
        group = Group(size, size)
        assert group.all_gather(A100, 3e9) == pytest.approx(share * 3e9 / 300e9)
        assert group.all_reduce(A100, 3e9) == pytest.approx(2 * share * 3e9 / 300e9)
    assert Group(1, 1).all_reduce(A100, 3e9) == 0


def test_groups_on_several_nodes_share_the_network() -> None:
    assert place(64, 1, 8, 8) == Group(8, 8)
    assert place(64, 8, 8, 8) == Group(8, 1)
    assert place(64, 2, 32, 8) == Group(32, 4)
    assert Group(8, 1).bandwidth(A100) == 25e9
    assert Group(32, 4).bandwidth(A100) == 100e9
    assert Group(64, 8).bandwidth(A100) == 200e9


def test_what_is_for_other_nodes_leaves_by_a_ranks_own_part_of_the_network() -> None:
    """Eight ranks on each of two nodes: half of the bytes at 25 GB/s, where a ring has 200 GB/s."""
    group = Group(16, 8)
    assert group.all_to_all(A100, 3e9) == pytest.approx(1.5e9 / (25e9 * DIRECT))
    assert group.all_gather(A100, 3e9) == pytest.approx(15 / 16 * 3e9 / 200e9)
    assert Group(8, 8).all_to_all(A100, 3e9) == pytest.approx(7 / 8 * 3e9 / 300e9)
    # Of a token's experts on one other node one copy goes there: three in four of two's.
    assert Group(16, 8).far_nodes(1) == pytest.approx(1 / 2)
    assert Group(16, 8).far_nodes(2) == pytest.approx(3 / 4)
    assert Group(8, 8).far_nodes(2) == 0
    expert = Matmul(4096, 28672, None, num_groups=16, share=8.0)
    kind = replace(MODEL.kinds[0], matmuls=(expert,), num_parameters_expert=16 * 4096 * 28672)
    model = replace(MODEL, kinds=(kind,))
    layout = Layout(data_size=16, expert_size=16, zero_stage=1, sequence_length=8192)
    sent = [
        step_time(model, layout, A100, engine).communication["expert"]
        for engine in (ENGINE, replace(ENGINE, is_deepspeed=False, expert_exposed=0.5))
    ]
    once = 8192 * 4096 * 2 / (25e9 * DIRECT)  # a token's bytes, all of them to the other node
    assert sent[0] == pytest.approx(8 * 4 * 4 * once)
    assert sent[1] == pytest.approx(0.5 * 8 * 4 * group.far_nodes(8) * once)


def test_parameters_that_an_engine_gathers_more_slowly_between_nodes() -> None:
    half = replace(A100, reach=replace(IDEAL, network=0.5))
    layout = Layout(data_size=16, zero_stage=3)
    usual, slow = (
        step_time(MODEL, layout, half, replace(ENGINE, network=share)).communication["data"]
        for share in (0.0, 0.1)
    )
    assert slow == pytest.approx(5 * usual)
    near = replace(layout, data_size=8)
    assert step_time(MODEL, near, half, replace(ENGINE, network=0.1)) == step_time(
        MODEL, near, half, replace(ENGINE, network=0.0)
    )


def test_keys_go_around_a_ring_beside_attention() -> None:
    """Of another engine than DeepSpeed: on one node nothing of it is left, between nodes it may."""
    ring = replace(ENGINE, is_deepspeed=False)
    slow = replace(A100, network_bandwidth=1e9, devices_per_node=1)
    layout = Layout(sequence_size=4, ring_size=4, sequence_length=4096)
    assert "sequence" not in step_time(MODEL, layout, A100, ring).communication
    assert (
        step_time(MODEL, replace(layout, ring_size=1), A100, ENGINE).communication["sequence"] > 0
    )
    left = step_time(MODEL, layout, slow, ring).communication["sequence"]
    keys = 3 * (1024 * 4096 * 2 * 2 / 4) / (1e9 * DIRECT)
    forward, backward = attention_seconds(
        slow, MODEL.kinds[0].attention, 1, 4096, num_ranks=4, score_passes=None
    )  # type: ignore[arg-type]
    assert left == pytest.approx(8 * (3 * keys - forward - backward))


def test_heads_that_tensor_cores_cannot_load_take_longer_where_scores_are_unfused() -> None:
    aligned, odd = Attention(64, 64, 216, 216), Attention(128, 128, 108, 108)
    for passes, factor in (((0.0, 0.0), 22), (None, 1)):
        fast, slow = (
            attention_seconds(A100, heads, 1, 2048, num_ranks=1, score_passes=passes).forward
            for heads in (aligned, odd)
        )
        assert slow / fast == pytest.approx(factor)


def test_products_in_eight_bits_cast_what_they_are_given() -> None:
    """Forward its input, backward the gradient of its output: read, and written twice in 8 bits."""
    product = Matmul(4096, 14336, "out")
    assert cast_bytes(product, RankShare(100, 2, 1, 2)) == (4 * 100 * 4096, 4 * 100 * 7168)
    expert = Matmul(4096, 14336, "out", num_groups=8, share=2.0)
    assert cast_bytes(expert, RankShare(100, 1, 8, 2)).forward == pytest.approx(4 * 200 * 4096)
    moved = sum(sum(cast_bytes(m, RankShare(2048, 1, 1, 2))) for m in MODEL.kinds[0].matmuls)
    # Without compilation by single operations, which move 33 bytes of an element where 4 would do.
    for is_fused, times in ((True, 1.0), (False, 33 / 4)):
        layout = Layout(fused_layers=is_fused)
        plain, cast = (step_time(MODEL, layout, A100, ENGINE, gain=gain) for gain in (1.0, 2.0))
        added = cast.memory_bound - plain.memory_bound
        assert added == pytest.approx(times * 8 * moved / 2.039e12)
        assert plain.matmul / 2 < cast.matmul < plain.matmul
        gain = replace(A100, float8_gain=2.0)
        assert step_time(MODEL, replace(layout, float8=True), gain, ENGINE) == cast


def test_experts_with_kernels_of_their_own_cost_the_host() -> None:
    expert = Matmul(4096, 1024, None, num_groups=8, share=2.0)
    kind = replace(MODEL.kinds[0], matmuls=(expert,), num_parameters_expert=8 * 4096 * 1024)
    model = replace(MODEL, kinds=(kind,))
    slow = replace(ENGINE, launch_overlap=1.0, expert_host_seconds=1e-3)
    for size, own in ((1, 8), (8, 1)):
        layout = Layout(data_size=8, expert_size=size, zero_stage=1)
        more = step_time(model, layout, A100, slow).host
        assert more == pytest.approx(8 * 3 * own * 1e-3)


def test_one_rank_takes_the_time_of_its_products() -> None:
    time = time_of(sequence_length=2048)
    flops = 6 * 2048 * (sum(MODEL.kinds[0].num_parameters_cut for _ in range(8)) + 32000 * 4096)
    attention = 3.5 * 2 * 2048**2 * 4096 * 8
    assert time.matmul == pytest.approx((flops + attention) / 312e12, rel=0.08)
    assert not time.communication
    assert time.bubble == 0
    assert sum(time.terms().values()) == pytest.approx(time.total)


def test_accumulation_and_recomputation_cost_what_they_should() -> None:
    once, thrice = time_of(), time_of(num_accumulation=3)
    assert thrice.matmul == pytest.approx(3 * once.matmul)
    # The gradients of two further micro-batches are added to a float32 sum: 10 bytes each of 40.
    assert thrice.optimizer == pytest.approx(1.5 * once.optimizer)
    full, half = time_of(recompute="full"), time_of(recompute="full", recompute_every=2)
    plain = once.matmul
    assert full.matmul - plain == pytest.approx(2 * (half.matmul - plain))


def test_tiles_compute_mlps_once_more() -> None:
    """Whether layers are recomputed or not; each further tile adds up gradients in float32."""
    weights = 3 * 4096 * 14336
    for recompute in ("none", "full"):
        changes: dict[str, Any] = {"recompute": recompute}
        once, one, four = (time_of(**changes, tiled_mlp=tiles) for tiles in ("off", 1, 4))
        anew = 8 * 2 * 2048 * weights / 312e12
        assert one.matmul - once.matmul == pytest.approx(anew, rel=0.08)
        assert four.matmul == one.matmul
        moved = 8 * 3 * 10 * weights / A100.memory_bandwidth
        assert four.memory_bound - one.memory_bound == pytest.approx(moved)
        assert time_of(**changes, tiled_mlp="auto") == once  # 2,048 tokens are one tile


def test_bubble_is_that_of_1f1b() -> None:
    """``(p - 1) / m`` of the work, where stages are equal."""
    even = replace(MODEL, vocabulary_size=0, embedding_parameters=0, head_parameters=0)
    engine = replace(ENGINE, balances_stages=False)
    layout = Layout(pipeline_size=4, num_accumulation=16, sequence_length=2048)
    time = step_time(even, layout, A100, engine)
    work = time.matmul + time.memory_bound
    assert time.bubble == pytest.approx(3 / 16 * work, rel=0.01)
    virtual = step_time(even, replace(layout, num_virtual_stages=2), A100, engine)
    assert virtual.bubble == pytest.approx(time.bubble / 2, rel=0.05)


def test_communication_has_a_name_for_each_kind() -> None:
    kinds = {
        "tensor": time_of(tensor_size=4),
        "sequence": time_of(sequence_size=4),
        "pipeline": time_of(pipeline_size=4, num_accumulation=4),
        "data": time_of(data_size=4, zero_stage=3),
    }
    for kind, time in kinds.items():
        assert kind in time.communication, kind
    assert set(kinds["tensor"].communication) == {"tensor"}
    # Of layers alone, which other programs hide beside products: no vocabulary, so no head.
    cut = replace(MODEL, vocabulary_size=0), Layout(tensor_size=4), A100
    hidden = step_time(*cut, replace(ENGINE, tensor_exposed=0.0)).communication["tensor"]
    sums = step_time(*cut, ENGINE).communication["tensor"] - hidden
    hidden_states = 2048 * 4096 * 2
    assert sums == pytest.approx(8 * 2 * 2 * Group(4, 4).all_reduce(A100, hidden_states))
    assert set(time_of(data_size=4, zero_stage=1).communication) == {"data"}


def test_experts_are_computed_by_those_who_hold_them() -> None:
    expert = Matmul(4096, 28672, None, num_groups=8, share=2.0)
    kind = replace(MODEL.kinds[0], matmuls=(expert,), num_parameters_expert=8 * 4096 * 28672)
    model = replace(MODEL, kinds=(kind,))
    alone = time_of(model, data_size=8, zero_stage=1, sequence_length=8192)
    shared = time_of(model, data_size=8, zero_stage=1, sequence_length=8192, expert_size=8)
    assert shared.communication["expert"] > 0
    # As many rows, sent by everybody, for an eighth of the experts; where few rows meet large
    # weights, those that are not read are saved.
    assert shared.matmul == pytest.approx(alone.matmul, rel=0.1)
    few = [
        time_of(model, data_size=8, zero_stage=1, sequence_length=16, expert_size=size).matmul
        for size in (1, 8)
    ]
    assert few[1] < few[0] / 2
    assert kind.num_active_parameters == pytest.approx(
        MODEL.kinds[0].num_parameters + 2 * 4096 * 28672
    )


def test_stages_hold_every_layer_once() -> None:
    for num_stages, balanced in itertools.product((1, 2, 3, 5), (False, True)):
        ranges = stage_layers(MODEL, num_stages, balanced=balanced)
        assert [layer for stage in ranges for layer in stage] == list(range(8))
        assert len(ranges) == num_stages


def test_a_measured_engine_takes_the_place_of_formulas() -> None:
    """A step of ZeRO 2 over four ranks: the engine's own seconds once, a ring's 3/2 of a pair's."""
    costs = {zero: ZeroCosts(1e-9, 2e-9, 3e-9, 4e-9) for zero in range(4)}
    engine = ENGINE.with_measured(MeasuredEngine(0.0, 0.0, costs))
    layout = Layout(
        data_size=4, sequence_length=2048, zero_stage=2, num_accumulation=5, parameter_bytes=4
    )
    time = step_time(MODEL, layout, A100, engine)
    size = 4 * MODEL.num_parameters
    assert time.optimizer == pytest.approx(size * (5 * 1e-9 + 2e-9))
    assert time.communication["data"] == pytest.approx(size * (5 * 3e-9 + 4e-9) * 3 / 2)
    alone = step_time(MODEL, replace(layout, data_size=1), A100, engine)
    assert not alone.communication
    # Nothing hides the host: what operations take to launch is added.
    slow = ENGINE.with_measured(MeasuredEngine(1e-3, 0.0, costs))
    launched = 3 * sum(MODEL.kinds[kind].num_kernels for kind in MODEL.layers) * 1e-3
    assert step_time(MODEL, layout, A100, slow).host == pytest.approx(5 * launched)


def test_muon_is_iterated_on_by_those_who_hold_a_stage() -> None:
    """Work falls with the ranks; what is sent is 2 x 2 bytes an element of a rank's part."""

    def more(**changes: Any) -> float:
        plain = time_of(zero_stage=2, **changes).optimizer
        costs = OptimizerCosts("muon")
        return time_of(zero_stage=2, optimizer=costs, **changes).optimizer - plain

    one, eight = more(data_size=1), more(data_size=8)
    shapes = [(4096, 4096)] * 2 + [(4096, 1024)] * 2 + [(4096, 14336)] * 3
    flops = sum(4 * min(s) ** 2 * max(s) + 2 * min(s) ** 3 for s in shapes) * 5 * 8
    assert 1.0 <= one / (flops / A100.peak_flops) < 1.3  # the last wave is not full
    sent = 2 * 2 * 8 * sum(rows * columns for rows, columns in shapes) / 8
    network = Group(8, 8).all_to_all(A100, sent / 2) * 2
    assert eight == pytest.approx(one / 8 + network, rel=1e-6)


def test_ranks_that_share_cores_wait_for_nothing_while_others_compute() -> None:
    """Four of them on two cores take twice as long; a pipeline's bubble is then others' work."""
    even = replace(MODEL, vocabulary_size=0, embedding_parameters=0, head_parameters=0)
    engine = replace(ENGINE, balances_stages=False)
    few = replace(A100, is_cpu=True, devices_per_node=4, num_cores=2, float32_flops=312e12)
    apart, enough = replace(few, num_cores=0), replace(few, num_cores=4)

    def time_on(device: Device, **changes: Any) -> StepTime:
        return step_time(even, replace(Layout(sequence_length=2048), **changes), device, engine)

    data = {"data_size": 4, "num_accumulation": 2}
    assert time_on(enough, **data) == time_on(apart, **data)
    assert time_on(few, **data).total == pytest.approx(2 * time_on(apart, **data).total)
    pipeline = {"pipeline_size": 4, "num_accumulation": 8}
    alone, shared = time_on(apart, **pipeline), time_on(few, **pipeline)
    assert alone.bubble > 0
    assert shared.bubble == 0
    assert shared.total == pytest.approx(2 * (alone.total - alone.bubble))
    # One micro-batch goes through one stage after the other, on however many cores.
    single = {"pipeline_size": 4, "num_accumulation": 1}
    assert time_on(few, **single).total == pytest.approx(time_on(apart, **single).total)
    assert time_on(few, **single).bubble > 0


def test_head_and_loss_take_what_was_published() -> None:
    """Wijmans et al. 2024 (arXiv 2411.09009), table A2: head and loss of Gemma 2 2B, forward and
    backward of 8,192 tokens on an A100, take 207 ms at once and 303 ms in Liger's chunks of 128
    tokens, with sums in 16 bits."""
    device = find_device("A100-80GB")
    engine = replace(engine_named("deepspeed"), step_seconds=0.0)

    def seconds(
        vocabulary: int, chunk: int | None, loss_kernels: LossKernels = "operators"
    ) -> float:
        model = closed_form(DenseShape(1, 2304, 8, 4, 9216, vocabulary))
        layout = Layout(sequence_length=8192, loss_chunk_tokens=chunk, loss_kernels=loss_kernels)
        time = step_time(model, layout, device, engine)
        return time.matmul + time.memory_bound

    without = seconds(1, None)
    assert seconds(256000, None) - without == pytest.approx(0.207, rel=0.05)
    assert seconds(256000, 128, "liger") - without == pytest.approx(0.303, rel=0.1)


def test_a_compiled_loss_moves_each_logit_three_times() -> None:
    """Of 16 bits: 2 bytes forward and 4 backward, as in Inductor's schedule; further losses, of
    multi-token prediction, are computed by operators."""
    device, engine = find_device("A100-80GB"), engine_named("deepspeed")
    model = closed_form(DenseShape(1, 2048, 32, 8, 8192, 128256))
    layout = Layout(sequence_length=8192, loss_chunk_tokens=2048)
    compiled_layout = replace(layout, loss_kernels="compiled")

    def saved_bytes(model: ModelCosts) -> float:
        times = [step_time(model, each, device, engine) for each in (layout, compiled_layout)]
        saved_seconds = times[0].memory_bound - times[1].memory_bound
        return saved_seconds * device.memory_bandwidth * device.reach.memory

    num_logits = 8192 * 128256
    assert saved_bytes(model) == pytest.approx((engine.loss_bytes - 6) * num_logits)
    assert saved_bytes(replace(model, num_further_losses=2)) == pytest.approx(saved_bytes(model))


@pytest.mark.parametrize(
    ("changes", "there", "back"),
    # In elements of all matrices, by hand: of n ranks each has an n-th and owns an n-th.
    [
        ({"data_size": 8, "zero_stage": 3}, 7 / 64, 7 / 64),
        ({"data_size": 4, "zero_stage": 1, "tensor_size": 2}, 7 / 64, 7 / 64),
        # Whole ones everywhere: nothing to bring, and all but the owner are sent the result.
        ({"data_size": 4, "zero_stage": 0}, 0, 3 / 4),
        # Halves on four pairs: the owner has one and is sent one, and gives away seven of eight.
        ({"data_size": 4, "zero_stage": 0, "tensor_size": 2}, 1 / 16, 7 / 16),
        ({"data_size": 1}, 0, 0),
        ({"data_size": 1, "tensor_size": 2}, 1 / 4, 1 / 4),
    ],
)
def test_bytes_of_whole_matrices(changes: dict[str, Any], there: float, back: float) -> None:
    layout = Layout(optimizer=OptimizerCosts("muon"), **changes)
    (stage,) = stages_of(MODEL, 1, False)
    size = 8 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    expected = 2 * size * there, 2 * size * back
    assert matrix_exchange(stage, MODEL, layout) == pytest.approx(expected)
    adamw = replace(layout, optimizer=OptimizerCosts("adamw"))
    assert matrix_exchange(stage, MODEL, adamw) == (0, 0)
