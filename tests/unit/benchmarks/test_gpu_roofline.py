"""Kernels of a step are counted and priced as they are; a step that was measured is predicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.gpu_proof.fake_cuda import why_not
from benchmarks.gpu_roofline import __main__ as gpu_roofline
from benchmarks.gpu_roofline.__main__ import (
    LIMIT,
    kernels_of,
    part_of_fused,
    shape_of,
    with_fused_loss,
)
from benchmarks.gpu_roofline.kernel import Kernel
from benchmarks.gpu_roofline.layouts import (
    AIM,
    ATTENTION,
    BEGIN,
    COMPUTING,
    END,
    EXPERTS,
    PAGE,
    PRODUCTS,
    Priced,
    parts_of,
    table,
    with_table,
)
from benchmarks.gpu_roofline.pricing import H100, price, priced_device, seconds_of
from benchmarks.gpu_roofline.recorder import KernelRecorder, exchange_bytes
from benchmarks.gpu_roofline.replicas import (
    LAYOUTS,
    Layout,
    least_bytes,
    moved_bytes,
    num_parameters,
    traced_kernels,
)
from benchmarks.gpu_roofline.rows import FURTHER, MEASURED, Row
from benchmarks.gpu_roofline.triton_launches import loads_and_stores
from benchmarks.support.points import SIZES
from bigtrain.models.build import empty_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.layers.float8 import float8_product
from bigtrain.planner.layout import Layout as RunLayout
from bigtrain.planner.model_costs import DenseShape
from bigtrain.planner.published.known_models import (
    ExpertDimensions,
    PublishedModelShape,
    costs_of,
)
from bigtrain.planner.seconds.communication import Group
from bigtrain.planner.step_time import step_time
from bigtrain.planner.tables.engines import engine_named
from bigtrain.planner.tables.hardware import find_device
from bigtrain.settings.run_config import ModelSection

REASON = why_not()
MIB = 1 << 20


def on_device(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def recorded(compute: Callable[[], object]) -> list[Kernel]:
    recorder = KernelRecorder()
    with recorder:
        compute()
    return recorder.kernels


# Operation, and how often the 4 MiB of a float32 tensor of MIB elements are moved.
MOVED: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], object], float]] = {
    "a sum reads two and writes one": (lambda a, b: a + b, 3),
    "in place": (lambda a, b: a.add_(b), 3),
    "zeros are only written": (lambda a, b: a.zero_(), 1),
    "out is only written": (lambda a, b: torch.add(a, b, out=b), 3),
    "a cast to 16 bits": (lambda a, b: a.bfloat16(), 1.5),
    "a view moves nothing": (lambda a, b: a.view(1024, -1).t(), 0),
    "empty memory": (lambda a, b: torch.empty_like(a), 0),
    "expanded is read once": (lambda a, b: on_device(1).expand(MIB) + b, 2 + 1 / MIB),
    "lists": (lambda a, b: torch._foreach_mul_([a, b], 2.0), 4),
    "softmax over wide rows": (lambda a, b: a.view(2, -1).log_softmax(1), 4),
}


@pytest.mark.parametrize("name", MOVED)
def test_bytes_of_an_operation(name: str) -> None:
    compute, times = MOVED[name]
    with FakeTensorMode():
        a, b = on_device(MIB), on_device(MIB)
        kernels = recorded(lambda: compute(a, b))
    assert sum(kernel.num_bytes for kernel in kernels) == 4 * MIB * times


def test_bytes_of_collectives() -> None:
    """Of a float32 tensor of MIB elements, which each of two ranks divides in halves."""
    with FakeTensorMode():
        whole, apart = on_device(MIB), on_device(MIB // 2)
        part = whole.narrow(0, MIB // 2, MIB // 2)
    sizes = {
        "allreduce_": exchange_bytes("allreduce_", ([whole], None)),
        "all-gather in place": exchange_bytes("_allgather_base_", (whole, part)),
        "all-gather": exchange_bytes("_allgather_base_", (whole, apart)),
        "reduce-scatter": exchange_bytes("_reduce_scatter_base_", (part, whole)),
    }
    assert sizes == {
        "allreduce_": 8 * MIB,
        "all-gather in place": 4 * MIB,
        "all-gather": 6 * MIB,
        "reduce-scatter": 6 * MIB,
    }


@pytest.mark.parametrize(
    ("layout", "least"),
    [
        (Layout(1, 1, 1), 40),
        (Layout(2, 1, 4), 40 + 3 * 10),
        (Layout(1, 8, 1), 6 + 4.5 + 34 / 8 + 2),
        (Layout(1, 8, 4), 6 + 4.5 + 34 / 8 + 2 + 3 * 10),
        (Layout(2, 8, 1), 6 + 4.5 + 34 / 8 + 2),
        (Layout(2, 8, 4), 4 * (6 + 4.5) + 3 * 12 / 8 + 34 / 8 + 2),
    ],
    ids=str,
)
def test_the_least_that_an_update_moves(layout: Layout, least: float) -> None:
    assert least_bytes(layout) == least


@pytest.mark.slow
@pytest.mark.skipif(REASON is not None, reason=REASON or "")
def test_an_update_moves_hardly_more_than_the_least() -> None:
    for layout, kernels in zip(LAYOUTS, traced_kernels(LAYOUTS, "10m"), strict=True):
        moved = moved_bytes(kernels, num_parameters("10m"))
        # The aim is 1.2 times the least; so near to it, no copy of the gradients hides.
        assert 0.99 < sum(moved.values()) / least_bytes(layout) < 1.02, (layout, moved)
        assert (moved["exchange"] > 1) == (layout.num_replicas > 1), (layout, moved)


def test_parts_of_modules() -> None:
    class RMSNorm(nn.Module):
        def forward(self, x: Any) -> Any:
            return x * 2

    class Linear(nn.Module):
        def forward(self, x: Any) -> Any:
            return x @ on_device(8, 8)

    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up_proj = Linear()

        def forward(self, x: Any) -> Any:
            return self.up_proj(x) * 2

    with FakeTensorMode():
        model = nn.ModuleDict({"layers": nn.ModuleList([nn.Sequential(RMSNorm(), MLP())])})
        recorder = KernelRecorder()
        recorder.watch(model)
        with recorder, torch.no_grad():
            model["layers"][0](on_device(4, 8))  # type: ignore[index]
    assert [kernel.part for kernel in recorder.kernels] == ["norms", "products", "activations"]
    assert recorder.kernels[1].product == (4, 8, 8, 1)


def test_grouped_products_of_experts_and_what_carries_rows_to_them() -> None:
    """64 rows of 8 to 4 experts of 16: the product, the gradient of the weights, weighted rows."""

    class Experts(nn.Module):
        def forward(self, x: Any, stack: Any, ends: Any, places: Any) -> Any:
            rows = x.index_select(0, places)
            inner = F.grouped_mm(rows, stack, offs=ends)
            activated = F.silu(inner) * inner
            return activated * on_device(64, 1, dtype=torch.bfloat16)

    with FakeTensorMode():
        model = nn.ModuleDict({"layer": nn.ModuleDict({"mlp": Experts()})})
        x, stack = (on_device(*n, dtype=torch.bfloat16) for n in ((32, 8), (4, 8, 16)))
        ends, places = (on_device(size, dtype=torch.int32) for size in (4, 64))
        rows, gradient = (on_device(64, n, dtype=torch.bfloat16) for n in (8, 16))
        recorder = KernelRecorder()
        recorder.watch(model)
        with recorder, torch.no_grad():
            model["layer"]["mlp"](x, stack, ends, places)  # type: ignore[index]
            F.grouped_mm(rows.t(), gradient, offs=ends)
    *forward, of_stack = recorder.kernels
    assert [(kernel.name, kernel.part) for kernel in forward] == [
        ("index_select", "dispatch"),
        ("_grouped_mm", "experts"),
        ("silu", "activations"),
        ("mul", "activations"),
        ("mul", "dispatch"),
    ]
    assert (forward[1].product, of_stack.product) == ((16, 8, 16, 4), (8, 16, 16, 4))
    assert forward[1].flops == of_stack.flops == 2 * 64 * 8 * 16


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_float8_products_are_recorded_as_what_torchao_calls(recipe: Any) -> None:
    function = float8_product(recipe, is_emulated=False)
    with FakeTensorMode():
        x, weight = (on_device(size, 32, dtype=torch.bfloat16) for size in (64, 16))
        kernels = recorded(lambda: function(x, weight))
    (made,) = (kernel for kernel in kernels if kernel.flops)
    assert (made.name, made.product, made.element_bytes) == ("_scaled_mm", (64, 32, 16, 1), 1)


def test_parameters_of_a_step_with_experts() -> None:
    (row,) = (row for row in FURTHER if row.name == "today, experts")
    model = empty_model(load_hf_config(ModelSection(config=row.point.model_config)))
    head_norms = 2 * 128 * model.config.num_hidden_layers
    num_parameters = sum(p.numel() for p in model.parameters())
    assert shape_of(row).num_parameters == num_parameters - head_norms
    assert shape_of(row).intermediate == 8 * 768


SOURCES = {
    "a = tl.load(x + i)\ntl.store(y + i, a)": ({"x"}, {"y"}),
    "p = x + i\nv = tl.load(p)\ntl.store(p, v)": ({"x"}, {"x"}),
    "x += i\nq = x + 1\ntl.store(q, 0)": (set(), {"x"}),
    "for i in range(3):\n    v = tl.load(y + i)\n    tl.store(x + v, v)": ({"y"}, {"x"}),
    "v = tl.load(y)\nw = v + 1\ntl.store(x + w, w)": ({"y"}, {"x"}),
}


@pytest.mark.parametrize("body", SOURCES)
def test_what_a_triton_kernel_loads_and_stores(body: str) -> None:
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    loaded, stored = loads_and_stores(f"def kernel(x, y, i):\n{lines}\n")
    assert (loaded - {"i"}, stored - {"i"}) == SOURCES[body]


def product(rows: int, depth: int, columns: int) -> Kernel:
    flops = 2 * rows * depth * columns
    return Kernel("mm", "products", 0, flops, (rows, depth, columns, 1))


def test_prices() -> None:
    launch = H100.reach.kernel_seconds
    # The product whose rate was measured takes what it took.
    large = product(8192, 8192, 8192)
    assert seconds_of(large, H100) == pytest.approx(large.flops / 731e12, rel=1e-4)
    # Tiles beyond two waves take a third wave.
    waves = seconds_of(product(128 * 132, 8192, 512), H100) - launch
    longer = seconds_of(product(128 * 133, 8192, 512), H100) - launch
    assert longer == pytest.approx(1.5 * waves)
    copy = Kernel("copy_", "optimizer", 2_884_000_000)
    assert seconds_of(copy, H100) == pytest.approx(1e-3 + launch, rel=1e-3)
    sums = Kernel("allreduce_", "exchange", 0, exchanged_bytes=10**9, num_ranks=1)
    assert seconds_of(sums, H100) == launch
    # Experts' tiles share waves, and each expert ends with a tile of its own.
    few = Kernel("_grouped_mm", "experts", 0, 0, (100, 8192, 512, 132))
    assert seconds_of(few, H100) == pytest.approx(seconds_of(product(128 * 132, 8192, 512), H100))
    eighth = replace(large, element_bytes=1)
    gain = (seconds_of(large, H100) - launch) / (seconds_of(eighth, H100) - launch)
    assert gain == pytest.approx(H100.float8_gain)
    eight = Kernel("allreduce_", "exchange", 0, exchanged_bytes=10**9, num_ranks=8)
    assert seconds_of(eight, H100) == Group(8, 8).all_reduce(H100, 1e9)


@pytest.mark.parametrize(
    ("operations", "part"),
    [
        (["aten.mean.dim", "aten.mul.Tensor", "aten.rsqrt.default"], "norms"),
        (["aten.exp.default", "aten.mul.Tensor"], "activations"),
        (["aten.cat.default", "aten.neg.default"], "rotary"),
        (["aten.add.Tensor"], "residuals"),
        (["aten.abs.default", "aten.max.default", "aten.permute.default"], "casts"),
    ],
)
def test_parts_of_fused_kernels(operations: list[str], part: str) -> None:
    assert part_of_fused(operations) == part


@pytest.mark.slow
@pytest.mark.skipif(REASON is not None, reason=REASON or "")
def test_a_measured_step_is_predicted() -> None:
    (before,) = (row for row in MEASURED if row.name == "chunks of 1 GiB")
    roofline = price(kernels_of(before), H100, shape_of(before))
    assert before.measured is not None
    assert before.tokens / roofline.seconds == pytest.approx(before.measured, rel=LIMIT)


def test_parts_of_a_default_add_up() -> None:
    """With experts and recomputation: half a third more of every product than without."""
    shape = PublishedModelShape(
        DenseShape(2, 1024, 8, 8, 1024, 32000), experts=ExpertDimensions(16, 2, 1024)
    )
    model, device = costs_of(shape), find_device("H100-80GB")
    layout = RunLayout(
        data_size=8, expert_size=4, zero_stage=1, recompute="full", micro_batch_size=4
    )
    parts = parts_of(model, layout, device)
    whole = step_time(model, layout, device, engine_named("deepspeed"))
    assert sum(parts.values()) == pytest.approx(whole.total)
    assert min(parts[name] for name in COMPUTING) > 0
    assert parts["recomputation"] > sum(parts[name] for name in (EXPERTS, ATTENTION)) / 4
    once = parts_of(model, layout.changed(recompute="none"), device)
    assert once["recomputation"] == 0
    assert once[EXPERTS] == pytest.approx(parts[EXPERTS])
    dense = costs_of(PublishedModelShape(DenseShape(2, 1024, 8, 8, 1024, 32000)))
    assert parts_of(dense, layout.changed(expert_size=1), device)[EXPERTS] == 0


def test_a_default_below_the_aim_names_its_parts() -> None:
    fast = Priced("a", "ZeRO 1", 1000.0, AIM, {PRODUCTS: 0.9, "memory-bound": 0.1})
    products = {EXPERTS: 0.2, ATTENTION: 0.3}
    slow = Priced("b", "TP 2", 500.0, 0.3, {**products, "tensor communication": 0.5})
    text = table([fast, slow])
    assert "| attention | 0.0% | 30.0% |" in text
    assert fast.reason() == ""
    assert slow.reason() in text
    assert "reach 60% of the peak there; the rest is tensor communication 50%." in slow.reason()
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert with_table(page, text) == f"before\n{BEGIN}\n{text}{END}\nafter\n"
    with pytest.raises(ValueError, match="has no"):
        with_table("a page", text)
    assert BEGIN in PAGE.read_text(encoding="utf-8")


def test_steps_are_priced_on_the_device_that_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the planner's rates, kernels for its compute capability, and no row that was measured on
    another device."""
    asked: list[tuple[str, int]] = []

    def product_kernels(row: Row, capability: int) -> list[Kernel]:
        asked.append((row.name, capability))
        return [product(8192, 8192, 8192)]

    monkeypatch.setattr(gpu_roofline, "kernels_of", product_kernels)
    monkeypatch.setattr(gpu_roofline, "why_not", lambda: None)
    assert gpu_roofline.main(["--gpu", "B200"]) == 0
    assert asked == [(row.name, 100) for row in FURTHER]
    assert "On one B200" in capsys.readouterr().out
    b200 = find_device("B200")
    peak = b200.peak_flops * b200.reach.matmul
    assert priced_device("B200") == b200
    assert seconds_of(product(8192, 8192, 8192), b200) > 2 * 8192**3 / peak
    assert gpu_roofline.main(["--only", "bare loop"]) == 1  # an H100 measured another rate
    assert asked[-1] == ("bare loop", 90)


def test_layers_are_compiled_for_the_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[tuple[str, ...]] = []

    def answer(module: str, _: object, *words: str) -> list[Any]:
        options.append((module.rpartition(".")[2], *words))
        fused = {"forward": [{"operations": ["aten.exp"], "num_bytes": 7}], "backward": []}
        traced = {"name": "mul", "part": "norms", "num_bytes": 5, "is_in_layer": True}
        update = [{"loads": 5, "stores": 4}]
        fused_step = {**fused, "update": update, "loss": [2.0, 4.0]}
        return [fused_step if module.endswith("fused_layer") else [{**traced, "product": None}]]

    monkeypatch.setattr(gpu_roofline, "answers", answer)
    gpu_roofline._fused.cache_clear()
    (compiled,) = (row for row in FURTHER if row.name == "today, compiled layers")
    kernels = kernels_of(compiled, 100)
    gpu_roofline._fused.cache_clear()
    assert options == [("traced_step",), ("fused_layer", "100")]
    assert [kernel.num_bytes for kernel in kernels] == [7] * SIZES["1b"]["num_hidden_layers"]


def test_a_compiled_loss_replaces_the_operators_of_each_chunk_and_nothing_else() -> None:
    """A head of as many elements as a chunk has logits is cast, too."""
    logits = 2048 * 128256

    def of_loss(name: str, bytes_of_logit: int, count: int = 1) -> list[Kernel]:
        return count * [Kernel(name, "loss", bytes_of_logit * logits)]

    chunk = [
        *of_loss("_to_copy", 6, 2),
        *of_loss("_log_softmax", 16),
        *of_loss("nll_loss_forward", 0),
        *of_loss("nll_loss_backward", 4),
        *of_loss("_log_softmax_backward_data", 20),
    ]
    others = [*of_loss("add_", 10), *of_loss("_to_copy", 6), Kernel("mul", "norms", 5)]
    kernels = with_fused_loss([*chunk, *chunk, *others], [2.0, 4.0])
    assert kernels[: len(others)] == others
    assert [kernel.num_bytes / logits for kernel in kernels[len(others) :]] == [2, 4, 2, 4]
