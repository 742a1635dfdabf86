"""Prediction of the run's time and memory, from its model and device."""

from __future__ import annotations

from typing import Any

import torch

from bigtrain.errors import ConfigError, ModelError
from bigtrain.models.layers.loss_plan import LossPlan
from bigtrain.models.tracing.traced_costs import model_costs
from bigtrain.planner.run_prediction import RunPrediction, predict_run
from bigtrain.planner.tables.calibration_file import kept_calibration
from bigtrain.planner.tables.engines import MeasuredEngine
from bigtrain.planner.tables.hardware import Device, find_device
from bigtrain.settings.resolve import ResolvedRun


def predict(
    run: ResolvedRun, hf_config: Any, loss: LossPlan, device: torch.device
) -> tuple[RunPrediction | None, str]:
    """Predict the time and memory of `run`; if impossible, return None and the reason.

    Not collective; takes a second or two.
    """
    try:
        model, _ = model_costs(run.config, hf_config)
    except (ConfigError, ModelError) as error:
        return None, " ".join(str(error).split())
    chunk = loss.chunk_tokens if loss.kind == "chunked" else None
    is_cpu = device.type == "cpu"
    return predict_run(run, model, chunk, *_device(device), is_cpu=is_cpu), ""


def _device(device: torch.device) -> tuple[Device | None, MeasuredEngine | None]:
    """Return a GPU of the tables, or this machine's CPUs if ``bigtrain plan --calibrate`` was
    run."""
    if device.type == "cpu":
        return kept_calibration() or (None, None)
    try:
        return find_device(torch.cuda.get_device_name(device)), None
    except ConfigError:
        return None, None
