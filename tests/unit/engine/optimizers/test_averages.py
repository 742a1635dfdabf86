"""Averages of masters (``optimizer.ema``), against torch's `AveragedModel`, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from bigtrain.engine.optimizers.adamw import AdamW
from bigtrain.engine.optimizers.update_rule import AVERAGE, RuleOptimizer
from bigtrain.engine.optimizers.update_rule import state_bytes_by_name as bytes_of

DECAY = 0.9


def optimizer_of(
    model: nn.Module, dtype: torch.dtype, average_decay: float | None = DECAY
) -> RuleOptimizer:
    names, parameters = zip(*model.named_parameters(), strict=True)
    group = {"params": parameters, "names": names, "rule": "adamw", "weight_decay": 0.1}
    rules = {"adamw": AdamW((0.9, 0.95), 1e-8, dtype)}
    return RuleOptimizer([group], rules, 1e-2, dtype, average_decay)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decay", [0.5, 0.999])
def test_equals_averaged_model(dtype: torch.dtype, decay: float) -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 8)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    optimizer = optimizer_of(model, dtype, decay)
    for _ in range(12):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        averaged.update_parameters(model)
        for parameter, average in zip(
            model.parameters(), averaged.module.parameters(), strict=True
        ):
            assert optimizer.state[parameter][AVERAGE].dtype == torch.float32
            assert torch.equal(optimizer.state[parameter][AVERAGE], average)


def test_states_that_were_allocated_before_the_first_update() -> None:
    """As `ensure_optimizer_states` does: that update is not counted."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    optimizer = optimizer_of(model, torch.float32)
    for rate in (0.0, 1e-2):
        model.weight.grad = torch.randn(4, 4)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        if not rate:
            optimizer.state[model.weight]["step"].zero_()
    assert torch.equal(optimizer.state[model.weight][AVERAGE], model.weight)


def test_restarted_averages_are_the_masters_and_move_on() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    optimizer = optimizer_of(model, torch.float32)
    for _ in range(2):
        model.weight.grad = torch.randn(4, 4)
        optimizer.step()
    optimizer.restart_averages()
    before = model.weight.detach().clone()
    average = optimizer.state[model.weight][AVERAGE]
    assert torch.equal(average, before)
    model.weight.grad = torch.randn(4, 4)
    optimizer.step()
    assert torch.equal(average, before.lerp(model.weight.detach(), 1 - DECAY))


def test_bytes_are_counted() -> None:
    model = nn.Linear(4, 4, bias=False)
    assert bytes_of(optimizer_of(model, torch.float32)) == {"weight": 12}
    assert bytes_of(optimizer_of(model, torch.bfloat16)) == {"weight": 8}
    assert bytes_of(optimizer_of(model, torch.bfloat16, None)) == {"weight": 4}
