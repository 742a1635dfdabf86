"""What is left out of DeepSpeed's step decides nothing: the same without it, to the bit."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

from bigtrain.engine.deepspeed_patches import leave_overflow_to_the_norm
from bigtrain.engine.startup.process_group import process_group
from bigtrain.system.world import World

# The largest finite gradient of float16 in every place has a norm that float32 holds.
BAD = {"nan": math.nan, "inf": math.inf, "minus inf": -math.inf, "large": 65504.0, "none": 1.0}


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with process_group(World(0, 1, 0)):
        yield


def train(value: float, dtype: torch.dtype, *, whole: bool) -> list[object]:
    """Three steps, of which the second has `value` in one gradient: weights, norms, scales."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(3, 5, generator=generator).to(dtype) for _ in range(4)]
    parameters = [torch.nn.Parameter(weight) for weight in weights]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.0}]
    optimizer = FP16_UnfusedOptimizer(
        torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1),
        low_precision_dtype=dtype,
        dynamic_loss_scale=dtype == torch.float16,
        dynamic_loss_args={
            "init_scale": 2.0**4,
            "scale_window": 2,
            "min_scale": 1.0,
            "delayed_shift": 1,
        },
        clip_grad=1.0,
        verbose=False,
    )
    if not whole:
        leave_overflow_to_the_norm(optimizer)
    found: list[object] = []
    for step in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn(3, 5, generator=generator).to(dtype)
        if step == 1:
            parameters[2].grad[1, 1] = value
        optimizer.step()
        scale = optimizer.loss_scale_config.cur_scale
        found += [optimizer.overflow, float(optimizer._global_grad_norm), float(scale)]
        found += [parameter.tolist() for parameter in parameters]
        found += [state["step"].item() for state in optimizer.optimizer.state.values()]
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", BAD.values(), ids=BAD.keys())
def test_the_norm_finds_what_the_overflow_check_finds(value: float, dtype: torch.dtype) -> None:
    found = train(value, dtype, whole=False)
    assert found == train(value, dtype, whole=True)
    assert (True in [f for f in found if isinstance(f, bool)]) == (not math.isfinite(value))
