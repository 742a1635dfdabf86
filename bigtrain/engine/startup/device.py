"""Type of device that this machine trains on."""

from __future__ import annotations

import os
from ctypes.util import find_library
from typing import Literal

import torch

from bigtrain.errors import ConfigError, Problem
from bigtrain.settings.accelerate import read_accelerate
from bigtrain.settings.resolve import resolve_run
from bigtrain.settings.run_config import RunConfig


def device_kind() -> Literal["cpu", "cuda"]:
    """Return the type of device that every rank of this machine uses."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def refuse_for_device(config: RunConfig, world_size: int) -> None:
    """Raise ConfigError for settings that are legal in general and not on this machine's devices,
    for example float16 on a CPU; a check on a login node cannot find them. Not collective: ranks
    with equal devices decide equally."""
    accelerate = read_accelerate(os.environ)
    async_io = find_library("aio") is not None
    resolve_run(config, world_size, device=device_kind(), accelerate=accelerate, async_io=async_io)
    if (
        config.precision.dtype == "bfloat16"
        and device_kind() == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        rule = f"{torch.cuda.get_device_name()} has no bfloat16"
        remedy = "precision.dtype: float16 or float32"
        raise ConfigError(Problem("precision.dtype", config.precision.dtype, rule, remedy))
