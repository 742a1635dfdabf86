"""Legal layouts, all of them and no others; what fits comes first, and the rest says what lacks."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

from bigtrain.planner import search as planner_search
from bigtrain.planner import stages
from bigtrain.planner.layout import Layout
from bigtrain.planner.legal_layouts import SearchSpace
from bigtrain.planner.model_costs import DenseShape, Matmul, ModelCosts, closed_form
from bigtrain.planner.plan_text import as_json, nothing_fits, plan_table
from bigtrain.planner.search import Candidate, Cluster, assess, longest_sample
from bigtrain.planner.search import search as whole_search
from bigtrain.planner.seconds import layer as layer_seconds
from bigtrain.planner.tables.engines import Engine, engine_named
from bigtrain.planner.tables.hardware import find_device
from bigtrain.settings.compatibility.check import check_compatibility
from bigtrain.settings.compatibility.facts import Facts
from bigtrain.settings.fast_path import ANY_CUDA
from bigtrain.settings.run_config import ModelSection

ENGINE = engine_named("deepspeed")
FACTS = Facts(
    device="cuda", attention_heads=32, cut_heads=32, cut_key_heads=8, num_layers=32,
    max_positions=8192,
)  # fmt: skip
SMALL = closed_form(DenseShape(32, 1024, 32, 8, 2816, 32000))
LARGE = closed_form(DenseShape(80, 8192, 64, 8, 28672, 128256))
BASE = Layout(
    overlap_communication=False,
    reduce_bucket_elements=50_000_000,
    gather_bucket_elements=50_000_000,
)
SECTION = ModelSection(config={"model_type": "llama"})
REQUEST = SearchSpace(SMALL, FACTS, BASE, 64, SECTION, ANY_CUDA)


def cluster(num_devices: int, name: str = "H100", host_memory: float = 1e12) -> Cluster:
    return Cluster(find_device(name), num_devices, host_memory)


def search(
    request: SearchSpace, cluster: Cluster, engine: Engine
) -> tuple[list[Candidate], list[Candidate]]:
    """Every layout looked at."""
    result = whole_search(request, cluster, engine, prunes=False)
    assert result.num_larger == 0
    return result.fitting, result.others


@pytest.mark.parametrize("num_devices", [1, 16])
def test_every_layout_is_legal_and_covers_the_run(num_devices: int) -> None:
    fitting, others = search(REQUEST, cluster(num_devices), ENGINE)
    assert fitting
    for candidate in (*fitting, *others):
        layout = candidate.layout
        assert layout.world_size == num_devices
        assert layout.global_batch_size == 64
        facts = FACTS | Facts(
            zero_stage=layout.zero_stage,
            world_size=num_devices,
            tensor_size=layout.tensor_size,
            pipeline_size=layout.pipeline_size,
            sequence_size=layout.sequence_size,
            offload_optimizer="cpu" if layout.offload_optimizer else None,
            offload_param="cpu" if layout.offload_parameters else None,
        )
        assert not check_compatibility(facts)
    layouts = [candidate.layout for candidate in (*fitting, *others)]
    assert len(set(layouts)) == len(layouts)


def test_what_a_trial_would_refuse_is_not_planned() -> None:
    """A layer that mixes tokens in an unknown way divides no sample; a model without a plan of its
    own is not cut."""
    (layer,) = SMALL.kinds
    state_space = replace(layer, attention=None)
    passing = replace(state_space, passes_states=True)
    recurrent = replace(passing, num_equal_parts=4)
    grouped = replace(passing, num_equal_parts=24, num_groups=3)
    whole = replace(
        layer, num_parameters_whole=layer.num_parameters, num_parameters_cut=0, num_tensors=9
    )
    for kinds, order, degrees in (
        ((layer, state_space), (0, 1) * 16, ({1, 2, 4, 8}, {1})),
        ((layer, passing), (0, 1) * 16, ({1, 2, 4, 8}, {1, 2, 4, 8})),
        ((layer, recurrent), (0, 1) * 16, ({1, 2, 4}, {1, 2, 4, 8})),
        ((grouped,), (0,) * 32, ({1}, {1, 2, 4, 8})),
        ((whole,), (0,) * 32, ({1}, {1, 2, 4, 8})),
    ):
        model = replace(SMALL, kinds=kinds, layers=order)
        fitting, others = search(replace(REQUEST, model=model), cluster(8), ENGINE)
        layouts = [candidate.layout for candidate in (*fitting, *others)]
        assert {layout.tensor_size for layout in layouts} == degrees[0]
        assert {layout.sequence_size for layout in layouts} == degrees[1]


def test_experts_are_divided_where_a_run_may_divide_them() -> None:
    request = replace(REQUEST, model=EXPERTS, facts=FACTS | Facts(num_experts=8))
    fitting, others = search(request, cluster(8), ENGINE)
    layouts = [c.layout for c in (*fitting, *others)]
    assert {layout.expert_size for layout in layouts} == {1, 2, 4, 8}
    for layout in layouts:
        names = ("zero_stage", "tensor_size", "pipeline_size", "sequence_size", "expert_size")
        degrees = {name: getattr(layout, name) for name in names}
        assert not check_compatibility(request.facts | Facts(world_size=8, **degrees))


def test_no_kind_of_parallelism_is_left_out_and_the_fastest_is_first() -> None:
    fitting, others = search(REQUEST, cluster(8), ENGINE)
    layouts = [candidate.layout for candidate in (*fitting, *others)]
    assert {layout.zero_stage for layout in layouts} == {0, 1, 2, 3}
    for axis in ("tensor_size", "pipeline_size", "sequence_size", "data_size"):
        assert {getattr(layout, axis) for layout in layouts} == {1, 2, 4, 8}, axis
    assert {layout.recompute for layout in layouts} == {"none", "full"}
    rates = [candidate.tokens_per_second for candidate in fitting]
    percent = math.exp(0.01)
    assert all(later <= percent * rate for rate, later in itertools.pairwise(rates))
    assert max(rates) <= percent * rates[0]
    # Of two as fast as each other, the smaller one.
    for first, second in itertools.pairwise(fitting):
        if second.tokens_per_second > first.tokens_per_second:
            assert first.memory.total <= second.memory.total
    usable = cluster(8).usable_memory
    assert all(candidate.memory.total <= usable for candidate in fitting)
    assert all(candidate.memory.total > usable for candidate in others)
    # Text and JSON say the same.
    table = plan_table(fitting, cluster(8), 3).splitlines()
    tree = as_json(fitting, cluster(8))
    assert len(table) == 1 + 3 + 1 + 2
    assert f"{tree[0]['tokens_per_second_per_device']:,.0f}" in table[1]
    for entry in tree:
        for terms in (entry["memory_bytes"], entry["step_seconds"]):
            parts = [value for name, value in terms.items() if name != "total"]
            assert sum(parts) == pytest.approx(terms["total"])


def test_no_more_layers_are_recomputed_than_have_to_be() -> None:
    tight = replace(cluster(8), margin=0.9)  # 8 GB of each device
    fitting, others = search(REQUEST, tight, ENGINE)
    some = [c.layout for c in fitting if c.layout.recompute_every > 1]
    assert {layout.recompute_every for layout in some} == {2, 3, 4}
    never = {c.layout for c in others if c.layout.recompute == "none"}
    for layout in some:
        assert replace(layout, recompute="none", recompute_every=1) in never
        fewer = replace(layout, recompute_every=layout.recompute_every + 1)
        if fewer.recompute_every <= 4:
            assert not assess(SMALL, fewer, tight, ENGINE).fits
        assert layout.describe().endswith(f"recompute 1/{layout.recompute_every}")


EXPERTS = replace(
    SMALL,
    kinds=(
        replace(
            SMALL.kinds[0],
            matmuls=(Matmul(1024, 5632, None, num_groups=8, share=2.0),),
            num_parameters_expert=8 * 1024 * 5632,
        ),
    ),
)


@pytest.mark.parametrize(
    ("model", "num_devices", "margin"),
    [
        (SMALL, 8, 0.9),  # 8 GB of each device: recomputation decides
        (SMALL, 4, 0.97),  # offload decides
        (LARGE, 16, 0.05),
        (EXPERTS, 8, 0.93),
    ],
)
def test_what_is_not_looked_at_would_not_fit(
    model: ModelCosts, num_devices: int, margin: float
) -> None:
    """Pruned and whole search find the same layouts in the same order, and as many that do not."""
    facts = FACTS | Facts(num_experts=8 if model is EXPERTS else None)
    request = replace(REQUEST, model=model, facts=facts)
    tight = replace(cluster(num_devices, "A100-80GB"), margin=margin)
    whole = whole_search(request, tight, ENGINE, prunes=False)
    pruned = whole_search(request, tight, ENGINE)
    assert [c.layout for c in pruned.fitting] == [c.layout for c in whole.fitting]
    assert pruned.num_others == whole.num_others
    # Layouts with equal peaks (tiles save nothing at the peak of the loss) come in any order.
    least_bytes = [ranking.others[0].memory.total for ranking in (pruned, whole) if ranking.others]
    assert least_bytes in ([], 2 * least_bytes[:1])
    looked_at = {c.layout for c in pruned.others}
    assert looked_at <= {c.layout for c in whole.others}


def test_a_thousand_layouts_are_had_by_few_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    """What layouts share is worked out once: layers of a micro-batch and degrees, stages and their
    sizes. Times are in docs/planner.md."""
    layer_seconds._passes.cache_clear()
    stages._sizes.cache_clear()
    looked_at: list[Layout] = []
    monkeypatch.setattr(
        planner_search,
        "assess",
        lambda model, layout, *rest: looked_at.append(layout) or assess(model, layout, *rest),
    )
    request = replace(
        REQUEST, model=LARGE, base=BASE.changed(sequence_length=8192), global_batch_size=512
    )
    result = whole_search(request, cluster(512), ENGINE)
    assert len(result.fitting) + result.num_others > 1000
    assert len(looked_at) < 0.7 * (len(result.fitting) + result.num_others)
    assert all(candidate.time.total > 0 for candidate in result.fitting)
    assert layer_seconds._passes.cache_info().misses < len(result.fitting) / 2
    assert stages._sizes.cache_info().misses < 200


def test_loss_and_buckets_are_varied_where_that_is_faster_or_lets_something_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Many ranks and a small batch: each bucket is a collective that waits for the slowest node.
    base = BASE.changed(gradient_bytes=2)
    request = replace(REQUEST, global_batch_size=1024, base=base)
    many = cluster(512, "A100-80GB")
    usual = whole_search(request, many, ENGINE).fitting
    varied = whole_search(replace(request, varies=True), many, ENGINE).fitting
    assert len(usual) == len(varied)
    changed = [c for c in varied if c.varied]
    assert changed
    assert all("buckets of" in c.describe() or "loss" in c.describe() for c in changed)
    assert varied[0].tokens_per_second >= usual[0].tokens_per_second
    without: dict[str, Any] = {"loss_chunk_tokens": None}
    without |= {"reduce_bucket_elements": 1, "gather_bucket_elements": 1}
    before = {replace(c.layout, **without): c for c in usual}
    for c in changed:
        plain = before[replace(c.layout, **without)]
        assert c.tokens_per_second > 1.01 * plain.tokens_per_second
    # Nothing fits by little: smaller buckets let the smallest in.
    large = BASE.changed(reduce_bucket_elements=500_000_000, gather_bucket_elements=500_000_000)
    one = replace(REQUEST, zero_stages=(3,), global_batch_size=8, base=large)
    smallest = whole_search(one, cluster(8), ENGINE)
    least = min(smallest.fitting, key=lambda c: c.memory.total)
    device = replace(find_device("H100"), memory_bytes=least.memory.total - 1e8)
    tight = Cluster(device, 8, 1e12, margin=0.0)
    monkeypatch.setattr(planner_search, "legal_savings", lambda *_: [])
    assert not whole_search(one, tight, ENGINE).fitting
    rescued = whole_search(replace(one, varies=True), tight, ENGINE).fitting
    assert rescued
    assert all("buckets of 10M" in c.describe() for c in rescued)


def test_offload_is_tried_where_nothing_else_fits() -> None:
    request = replace(REQUEST, model=LARGE)
    fitting, others = search(request, cluster(8, "A100-80GB", host_memory=3e12), ENGINE)
    assert fitting
    assert all(candidate.layout.offload_optimizer for candidate in fitting)
    poor, others = search(request, cluster(8, "A100-80GB", host_memory=1e11), ENGINE)
    assert not poor
    # The smallest on a device wants main memory that is not there.
    rule, remedy = nothing_fits(others, cluster(8, "A100-80GB", host_memory=1e11))
    assert "main memory" in rule
    assert "--host-memory" in remedy
    # What fits but for the copy of an asynchronous save needs none of one that waits.
    usable = cluster(8, "A100-80GB").usable_memory
    memories = [c.memory for c in others if c.memory.total <= usable]
    least = min(memory.host_offload + memory.host_activations for memory in memories)
    enough = cluster(8, "A100-80GB", host_memory=8.1 * least)
    none, others = search(request, enough, ENGINE)
    assert not none
    rule, remedy = nothing_fits(others, enough)
    assert "offload" in rule
    assert "checkpoint" in rule
    assert "checkpoint.asynchronous: false" in remedy
    assert search(replace(request, base=request.base.changed(copies_states=False)), enough, ENGINE)[
        0
    ]


def test_a_ring_extends_ulysses_where_heads_or_hosts_limit_it() -> None:
    facts = REQUEST.facts | Facts(attention_heads=32)
    request = replace(
        REQUEST, facts=facts, base=BASE.changed(sequence_length=65536), global_batch_size=1
    )
    fitting, others = search(request, cluster(64), ENGINE)
    kinds = {(c.layout.ulysses_size, c.layout.ring_size) for c in (*fitting, *others)
             if c.layout.tensor_size == 1 and c.layout.sequence_size == 64}  # fmt: skip
    assert kinds == {(32, 2), (8, 8)}
    assert all(c.layout.ring_size == 1 for c in (*fitting, *others)
               if c.layout.tensor_size * c.layout.sequence_size <= 8)  # fmt: skip


def long_samples(length: int, **facts: Any) -> SearchSpace:
    """A sample of `length` tokens of a model of 8B."""
    model = closed_form(DenseShape(32, 4096, 32, 8, 14336, 128256))
    known = FACTS | Facts(max_positions=None, **facts)
    return replace(
        REQUEST,
        model=model,
        facts=known,
        base=BASE.changed(sequence_length=length),
        section=SECTION.model_copy(update={"loss": "chunked"}),
        global_batch_size=1,
    )


def test_activations_are_offloaded_where_nothing_else_fits() -> None:
    fitting, _ = search(long_samples(131072), cluster(1), ENGINE)
    assert fitting
    assert fitting[0].layout.offload_activations
    assert fitting[0].layout.recompute == "full"
    assert fitting[0].memory.host_activations > 0
    assert fitting[0].layout.describe().endswith("activation offload")
    every = itertools.chain(*search(long_samples(131072, adapters="lora"), cluster(1), ENGINE))
    assert not any(candidate.layout.offload_activations for candidate in every)


def test_mlps_are_tiled_where_nothing_else_fits() -> None:
    fitting, _ = search(long_samples(409600), cluster(1), ENGINE)
    assert fitting
    assert all(candidate.layout.tiled_mlp == "auto" for candidate in fitting)
    assert ", tiled MLP, " in fitting[0].describe()
    # A run's own tiles are kept, and no others proposed.
    long_request = long_samples(409600)
    tiled_by_eight = replace(long_request, base=long_request.base.changed(tiled_mlp=8))
    for request, tiles in ((long_samples(409600, float8="rowwise"), "off"), (tiled_by_eight, 8)):
        every = [*itertools.chain(*search(request, cluster(1), ENGINE))]
        assert every
        assert {candidate.layout.tiled_mlp for candidate in every} == {tiles}


@pytest.mark.parametrize("num_devices", [1, 8])
def test_the_longest_sample_fits_and_one_of_two_percent_more_does_not(num_devices: int) -> None:
    length, ranking = longest_sample(long_samples(4096), cluster(num_devices), ENGINE)
    assert length % (2 * num_devices) == 0
    layout = ranking.fitting[0].layout
    assert (layout.sequence_length, layout.global_batch_size) == (length, 1)
    assert layout.sequence_size * layout.tensor_size == num_devices
    grain = 1024 * num_devices
    longer = -(-(length + length // 50) // grain) * grain
    assert not whole_search(long_samples(longer), cluster(num_devices), ENGINE).fitting
    same = whole_search(long_samples(length), cluster(num_devices), ENGINE)
    assert [c.layout for c in same.fitting] == [c.layout for c in ranking.fitting]
    # The same with float8, which cannot be tiled: fewer.
    assert longest_sample(long_samples(4096, float8="rowwise"), cluster(1), ENGINE)[0] < length


def test_pairs_take_two_rows_and_a_reference_further_passes() -> None:
    """Micro-batches are counted in samples; tokens are those of rows with gradients."""
    usual = replace(long_samples(2048), global_batch_size=16)
    pairs = replace(usual, base=usual.base.changed(rows_per_sample=2))
    two = whole_search(pairs, cluster(8), ENGINE).fitting[0]
    rows = replace(two.layout, rows_per_sample=1, micro_batch_size=2 * two.layout.micro_batch_size)
    single = assess(pairs.model, rows, cluster(8), ENGINE)
    assert two.memory == single.memory
    assert two.tokens_per_second == pytest.approx(single.tokens_per_second)
    again = assess(pairs.model, replace(two.layout, num_reference_rows=2), cluster(8), ENGINE)
    assert again.memory == two.memory
    # A forward pass is a third of a step's products; a layer recomputed makes it a fourth.
    share = again.time.terms()["matmul"] / two.time.terms()["matmul"] - 1
    assert 0.2 < share < 0.36


def test_no_sample_fits_a_device_smaller_than_the_states() -> None:
    tight = replace(cluster(1), device=replace(find_device("H100"), memory_bytes=4e9))
    length, ranking = longest_sample(long_samples(4096), tight, ENGINE)
    assert (length, ranking.fitting) == (0, [])
    assert ranking.others


def test_a_larger_micro_batch_is_no_reason_to_offload() -> None:
    """A few percent that predictions cannot tell apart, against a host's memory and PCIe."""
    fitting, others = search(
        replace(REQUEST, model=LARGE, base=BASE.changed(sequence_length=8192)), cluster(64), ENGINE
    )

    def degrees(layout: Layout) -> tuple[int, ...]:
        return (layout.zero_stage, layout.tensor_size, layout.pipeline_size, layout.sequence_size)

    offloaded = {degrees(c.layout) for c in (*fitting, *others) if c.layout.offload_optimizer}
    without = {degrees(c.layout) for c in fitting if not c.layout.offload_optimizer}
    assert without
    assert offloaded
    assert not offloaded & without


def test_nothing_fits_names_what_is_missing() -> None:
    request = replace(REQUEST, model=LARGE, zero_stages=(3,))
    few = Cluster(find_device("A100-40GB"), 2, 1e9)
    fitting, others = search(request, few, ENGINE)
    assert not fitting
    rule, remedy = nothing_fits([c for c in others if not c.memory.host_offload], few)
    assert "no layout fits 2 x A100-40GB" in rule
    assert "states" in rule
    assert "devices" in remedy
