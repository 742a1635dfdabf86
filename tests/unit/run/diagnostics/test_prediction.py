"""What is said of a run before it begins and after; what cannot fit is refused, or said so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bigtrain.errors import LaunchError
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.equivalence.model_plan import ModelPlan
from bigtrain.models.layers.document_attention import NOT_ISOLATED
from bigtrain.models.layers.plans import LossPlan
from bigtrain.planner.run_prediction import RunPrediction, refuse_too_large
from bigtrain.planner.search import Cluster
from bigtrain.planner.tables.engines import cpu_engine, keep_calibration
from bigtrain.planner.tables.hardware import find_device
from bigtrain.run.prediction import predict
from bigtrain.settings.resolve import resolve_run_files
from bigtrain.system import user_cache

PLAIN = LossPlan("plain", 1024, "")


def plan_of(loss: LossPlan) -> ModelPlan:
    return ModelPlan(None, NOT_ISOLATED, loss)


def prediction(*overrides: str, world_size: int = 2, loss: LossPlan = PLAIN) -> RunPrediction:
    run = resolve_run_files("quickstart", overrides, world_size)
    hf_config = load_hf_config(run.config.model)
    run_prediction, reason = predict(run, hf_config, plan_of(loss), torch.device("cpu"))
    assert run_prediction is not None, reason
    return run_prediction


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> RunPrediction:
    run = resolve_run_files("quickstart", ["precision.dtype=bfloat16"], 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100 80GB HBM3")
    hf_config = load_hf_config(run.config.model)
    run_prediction, reason = predict(run, hf_config, plan_of(PLAIN), torch.device("cuda"))
    assert run_prediction is not None, reason
    return run_prediction


def test_what_the_run_says_decides() -> None:
    base = prediction().memory
    assert prediction("batch.micro_batch_size=2").memory.activations < base.activations
    full = prediction("model.gradient_checkpointing=full").memory
    assert full.activations < base.activations
    chunked = prediction(loss=LossPlan("chunked", 16, "")).memory
    assert chunked.loss < base.loss
    assert prediction("engine.deepspeed_config=zero3").memory.states < base.states
    assert prediction(world_size=1).memory.states > base.states


def test_a_cpu_gets_no_rate_and_a_gpu_does(
    on_gpu: RunPrediction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIGTRAIN_CACHE", str(tmp_path / "cache"))  # with no calibration in it
    quiet = prediction()
    assert quiet.tokens_per_second is None
    assert "tokens/s" not in quiet.line()
    assert quiet.beside(100.0, 1.0) == []
    quiet.write(tmp_path)
    tree = json.loads((tmp_path / "prediction.json").read_text())
    assert tree["peak_memory_gib"] is None  # main memory of a process says nothing of its tensors
    assert tree["memory_terms"]["context"] < 0.05 * sum(tree["memory_terms"].values())
    rate = on_gpu.tokens_per_second
    assert rate is not None
    assert on_gpu.line().endswith(f"{rate:,.0f} tokens/s on H100-80GB")
    (line,) = on_gpu.beside(rate / 2, on_gpu.memory.allocated / 2**30)
    assert "(+100%)" in line
    assert "(+0%)" in line
    on_gpu.write(tmp_path)
    tree = json.loads((tmp_path / "prediction.json").read_text())
    assert sum(tree["terms"].values()) == pytest.approx(tree["step_seconds"])
    parts = [size for name, size in tree["memory_terms"].items() if name != "context"]
    assert sum(parts) == pytest.approx(tree["peak_memory_gib"])


def test_what_cannot_fit_is_refused_unless_told_otherwise() -> None:
    run_prediction = prediction()
    smallest = run_prediction.memory.total / 0.95
    assert refuse_too_large(run_prediction, smallest * 1.001, refuses=True) == ""
    with pytest.raises(LaunchError, match=r"engine\.refuse_too_large=false"):
        refuse_too_large(run_prediction, smallest * 0.999, refuses=True)
    assert "predicted to need" in refuse_too_large(run_prediction, smallest * 0.9, refuses=False)


def test_a_plan_and_a_run_go_by_one_rule() -> None:
    run_prediction = prediction()
    for share in (0.999, 1.001):
        device = replace(
            find_device("H100"), memory_bytes=share * run_prediction.memory.total / 0.95
        )
        fits = run_prediction.memory.total <= Cluster(device, 2, 1e12).usable_memory
        assert fits == (refuse_too_large(run_prediction, device.memory_bytes, refuses=False) == "")


def test_a_calibrated_cpu_gets_a_rate_and_no_word_on_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BIGTRAIN_CACHE", str(tmp_path))
    assert prediction().tokens_per_second is None
    keep_calibration(find_device("CPU"), cpu_engine())
    told = prediction()
    assert told.device == "CPU"
    rate = told.tokens_per_second
    assert rate is not None
    assert told.beside(rate * 2, 123.0) == [f"predicted {rate:,.0f} tokens/s (-50%)"]
    monkeypatch.setattr(user_cache, "_fingerprint", lambda library: f"{library} of another day")
    assert prediction().tokens_per_second is None  # it was measured with other libraries
    assert told.memory.context == pytest.approx(0.05 * told.memory.allocated)
