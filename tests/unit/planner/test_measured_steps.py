"""Predictions beside the steps that were measured on an H100 (docs/benchmarks.md), with single
kernels, Liger's, and compiled ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigtrain.errors import LaunchError
from bigtrain.planner.run_prediction import RunPrediction, refuse_too_large
from bigtrain.planner.seconds.kernels import matmul_seconds
from bigtrain.planner.tables.hardware import find_device
from bigtrain.python_api.planning import predicted_run
from bigtrain.settings.resolve import resolve_run_files
from bigtrain.system.units import GIB

H100 = find_device("H100-80GB")
SMALL_CHUNKS = "model.loss_chunk_tokens=523"
OPERATORS_OF_THE_LOSS = "objective.z_loss=1e-9"
"""A loss with a further term is not compiled, as none was at the time."""
SINGLE = ("model.kernels=none", "model.compile=off")
MEASURED: dict[str, tuple[tuple[str, ...], float, float]] = {
    "chunks of 256 MiB": ((*SINGLE, SMALL_CHUNKS), 38_580, 49.8),
    "chunks of 1 GiB": ((*SINGLE, "model.loss_chunk_tokens=2093"), 41_344, 52.1),
    "Liger's layers": (("model.kernels=liger", "model.compile=off", SMALL_CHUNKS), 46_701, 41.7),
    "compiled layers": (("model.compile=on", SMALL_CHUNKS, OPERATORS_OF_THE_LOSS), 46_779, 41.8),
}
"""Overrides, tokens/s and GiB, of Llama 3.2 1B with ZeRO 1."""


def predicted(*overrides: str, samples: int = 4) -> RunPrediction:
    """A step of one micro-batch of samples of 4,096 tokens."""
    batch = (
        "batch.sequence_length=4096", "batch.global_tokens=null",
        f"batch.micro_batch_size={samples}", f"batch.global_batch_size={samples}",
    )  # fmt: skip
    layout = ("model.gradient_checkpointing=none", "engine.deepspeed_config=zero1")
    run = resolve_run_files("llama3_1b", [*batch, *layout, *overrides], 1, device="cuda")
    return predicted_run(run, H100)[0]


@pytest.mark.parametrize("name", MEASURED)
def test_measured_steps_are_predicted(name: str) -> None:
    overrides, tokens_per_second, gib = MEASURED[name]
    prediction = predicted(*overrides)
    assert prediction.tokens_per_second == pytest.approx(tokens_per_second, rel=0.1)
    assert prediction.memory.allocated / GIB == pytest.approx(gib, rel=0.08)


def test_a_run_that_fits_with_fused_layers_is_not_refused() -> None:
    """Of 26,624 tokens: above 80 GiB by single kernels, about 60 with Liger's."""
    single, fused, by_default = (
        predicted(*overrides, samples=7) for overrides in (SINGLE, ("model.kernels=liger",), ())
    )
    with pytest.raises(LaunchError, match="bigtrain plan"):
        refuse_too_large(single, H100.memory_bytes, refuses=True)
    for prediction in (fused, by_default):
        assert prediction.memory.allocated < 0.85 * single.memory.allocated
        assert refuse_too_large(prediction, H100.memory_bytes, refuses=True) == ""


def test_every_way_to_compute_has_its_own_prediction() -> None:
    """Eager casts of float8 cost what the products gain; compiled ones do not. The compiled
    loss moves fewer bytes than Liger's, which has no float32 sums, but more and smaller chunks."""
    rates = {
        name: predicted(*overrides).tokens_per_second
        for name, overrides in {
            "single": SINGLE,
            "default": (),
            "fused loss": ("model.loss=liger",),
            "float8": ("precision.float8=tensorwise",),
            "eager float8": (*SINGLE, "precision.float8=tensorwise"),
        }.items()
    }
    assert rates.pop("fused loss") == pytest.approx(rates["default"], rel=0.05)
    order = sorted(rates, key=lambda name: rates[name] or 0.0)
    assert order == ["eager float8", "single", "default", "float8"]
    compiled, fused = predicted(), predicted("model.loss=liger")
    by_operators = predicted(OPERATORS_OF_THE_LOSS)
    assert fused.memory.loss < compiled.memory.loss < by_operators.memory.loss
    assert fused.memory.loss < by_operators.memory.loss / 4


def test_the_measured_product_is_the_tables() -> None:
    assert H100.measured_reach is not None
    device = replace(H100, reach=H100.measured_reach)
    rate = 2 * 8192**3 / matmul_seconds(device, 8192, 8192, 8192, 2)
    assert rate == pytest.approx(731e12, rel=1e-3)
    assert device.memory_bandwidth * device.reach.memory == pytest.approx(2.884e12, rel=1e-3)
