"""A calibration is of this machine: each figure was measured, and the planner uses it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bigtrain.cli import main
from bigtrain.engine import calibrate_device, calibrate_engine
from bigtrain.planner.tables.engines import MeasuredEngine, ZeroCosts, load_calibration


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate_device, "_SECONDS", 0.0)
    monkeypatch.setattr(calibrate_device, "_LARGEST_SIZE", {"cpu": 128, "cuda": 128})
    monkeypatch.setattr(calibrate_device, "_MIB", 2**14)
    monkeypatch.setattr(calibrate_device.torch.cuda, "is_available", lambda: False)
    # Twenty engines in two worlds: `test_the_engine_is_measured`.
    costs = {zero: ZeroCosts(1e-9, 2e-9, 3e-10, 1e-9 * (zero + 1)) for zero in range(4)}
    engine = MeasuredEngine(1e-5, 1e-4, costs)
    monkeypatch.setattr(calibrate_engine, "measure_engine", lambda: engine)


@pytest.mark.slow
def test_what_is_measured_is_what_is_planned_with(
    quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "this.json"
    assert main(["plan", "--calibrate", "--output", str(path)]) == 0
    assert f"--hardware {path}" in capsys.readouterr().out
    device, engine = load_calibration(path)
    assert device.is_cpu
    assert engine == calibrate_engine.measure_engine()
    for name in ("peak_flops", "memory_bandwidth", "link_bandwidth", "host_memory_bandwidth"):
        assert 1e6 < getattr(device, name) < 1e15, name
    assert 0 < device.reach.attention < 10
    assert 0 < device.reach.kernel_seconds < 0.1
    plan = ["plan", "--config", "quickstart", "--gpus", "2xCPU", "--hardware", str(path), "--json"]
    seconds = []
    for slower in (1, 1000):
        tree = json.loads(path.read_text())
        tree["device"]["peak_flops"] = device.peak_flops / slower
        path.write_text(json.dumps(tree))
        assert main(plan) == 0
        first = json.loads(capsys.readouterr().out)["layouts"][0]
        seconds.append(first["step_seconds"]["matmul"])
    # Beside products, attention and the smallest operation are in there.
    assert seconds[1] > 3 * seconds[0]


def test_a_calibration_needs_a_place(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plan", "--calibrate"]) == 2
    assert "--output: is required for --calibrate" in capsys.readouterr().err
    assert main(["plan", "--calibrate", "--output", str(tmp_path / "no" / "x.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.slow
def test_the_engine_is_measured() -> None:
    engine_costs = calibrate_engine.measure_engine()
    assert 1e-7 < engine_costs.kernel_host_seconds < 1e-2
    assert 0 <= engine_costs.parameter_host_seconds < 0.1
    assert sorted(engine_costs.zero) == [0, 1, 2, 3]
    for stage, costs in engine_costs.zero.items():
        parts = (costs.micro_batch, costs.step, costs.micro_batch_exchange, costs.step_exchange)
        assert all(0 <= part < 1e-6 for part in parts), stage
        assert sum(parts) > 1e-11, stage


@pytest.mark.parametrize("exchange", [2.0, 0.5])
def test_costs_are_recovered_from_seconds_of_steps(
    monkeypatch: pytest.MonkeyPatch, exchange: float
) -> None:
    """`exchange`: a step of two ranks in those of one. Less is a busy machine's, and no cost."""
    deep, wide = map(calibrate_engine._costs, (calibrate_engine._DEEP, calibrate_engine._WIDE))
    kernel, hook = 1e-5, 2e-5
    launched = 3 * calibrate_engine._num_kernels(wide) * kernel
    num_tensors = sum(deep.kinds[layer_type].num_tensors for layer_type in deep.layers)

    def seconds_of(world_size: int) -> dict[str, float]:
        factor = exchange if world_size == 2 else 1.0
        deep_step = 3 * calibrate_engine._num_kernels(deep) * kernel
        seconds = {
            "deep 0 1": deep_step,
            "deep 3 1": deep_step + num_tensors * hook,
        }
        for zero in range(4):
            for count in calibrate_engine._ACCUMULATIONS:
                batch, step = launched + factor * (1 + zero), factor * 10.0 * (1 + zero)
                seconds[f"wide {zero} {count}"] = count * batch + step
        return seconds

    monkeypatch.setattr(calibrate_engine, "_seconds", seconds_of)
    measured = calibrate_engine.measure_engine()
    size = wide.num_parameters * 4
    assert measured.kernel_host_seconds == pytest.approx(kernel)
    assert measured.parameter_host_seconds == pytest.approx(hook)
    own, more = min(1.0, exchange), max(0.0, exchange - 1.0)
    for zero, costs in measured.zero.items():
        expected = [
            own * (1 + zero),
            own * 10 * (1 + zero),
            more * (1 + zero),
            more * 10 * (1 + zero),
        ]
        parts = [costs.micro_batch, costs.step, costs.micro_batch_exchange, costs.step_exchange]
        assert [part * size for part in parts] == pytest.approx(expected)
