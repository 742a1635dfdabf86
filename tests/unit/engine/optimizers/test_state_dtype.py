"""Moments in bfloat16: unbiased, the same again, and moving where rounding to the nearest stops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bigtrain.engine.optimizers.adamw import AdamW
from bigtrain.engine.optimizers.lion import Lion
from bigtrain.engine.optimizers.update_rule import Master, UpdateRule, chunks, store
from bigtrain.settings.sections.optimizer import OPTIMIZERS
from tests.parity import plain_optimizers


def test_rounding_is_right_on_average() -> None:
    generator = torch.Generator().manual_seed(1)
    value = torch.full((1 << 20,), 1.001)  # between 1 and 1 + 2 ** -7
    moment = torch.zeros(1 << 20, dtype=torch.bfloat16)
    store(moment, value, torch.randn(1 << 20, generator=generator))
    assert set(moment.unique().tolist()) == {1.0, 1.0078125}
    assert abs(float(moment.double().mean()) - 1.001) < 3e-5


def test_a_slow_moment_arrives() -> None:
    """By 1/1000 of the distance a step: less than half of a bfloat16's last digit."""
    generator = torch.Generator().manual_seed(2)
    moment = torch.ones(4096, dtype=torch.bfloat16)
    nearest = moment.clone()
    for _ in range(3000):
        gradient = torch.randn(4096, generator=generator)
        store(moment, moment.float().lerp_(torch.full((4096,), 2.0), 1e-3), gradient)
        nearest.copy_(nearest.float().lerp_(torch.full((4096,), 2.0), 1e-3))
    assert nearest.eq(1.0).all()
    assert abs(float(moment.double().mean()) - 1.95) < 0.01


def test_the_same_gradient_rounds_the_same() -> None:
    generator = torch.Generator().manual_seed(3)
    value, gradient = torch.randn(2, 1000, generator=generator)
    first, second = (torch.zeros(1000, dtype=torch.bfloat16) for _ in range(2))
    store(first, value, gradient)
    store(second, value.clone(), gradient.clone())
    assert torch.equal(first, second)
    assert not torch.equal(first, value.bfloat16())


def test_negative_values_and_what_bfloat16_holds() -> None:
    value = torch.tensor([-1.5, 0.0, 2.0, -3e-30])
    value[3] = float(torch.tensor(-3e-30).bfloat16())
    moment = torch.zeros(4, dtype=torch.bfloat16)
    store(moment, value, torch.randn(4, generator=torch.Generator().manual_seed(4)))
    assert torch.equal(moment.float(), value)


def test_chunks_are_views() -> None:
    tensor = torch.zeros(2, 3)
    for (part,) in chunks(tensor):
        part += 1
    assert tensor.eq(1).all()


class PlainLion:
    """With torch's lerp, so that its states round as the rule's do."""

    def __init__(self, master: torch.Tensor) -> None:
        self.master, self.state = master, {"exp_avg": torch.zeros_like(master)}

    def step(self) -> None:
        gradient, moment = self.master.grad, self.state["exp_avg"]
        self.master.mul_(1 - 1e-2 * 0.1)
        self.master.add_(moment.lerp(gradient, 1 - 0.9).sign(), alpha=-1e-2)
        moment.copy_(plain_optimizers.in_bfloat16(moment.lerp(gradient, 1 - 0.99), gradient))


@pytest.mark.parametrize("kind", ["adamw", "lion"])
def test_states_are_those_of_a_plain_loop(kind: str) -> None:
    """To the last bit, of equal gradients."""
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(64, 32, generator=generator)
    master, state = values.clone(), {}
    plain: Any
    if kind == "adamw":
        rule: UpdateRule = AdamW((0.9, 0.99), 1e-8, torch.bfloat16)
        options: dict[str, Any] = {"betas": (0.9, 0.99), "weight_decay": 0.1, "fused": True}
        inner = torch.optim.AdamW([master], lr=1e-2, **options)
        plain = plain_optimizers.Kept(inner, plain_optimizers.in_bfloat16)
        kept = inner.state[master]
    else:
        rule = Lion((0.9, 0.99), torch.bfloat16)
        plain = PlainLion(master)
        kept = plain.state
    for _ in range(20):
        gradient = torch.randn(64, 32, generator=generator)
        rule.update([Master(values, gradient, state)], {"lr": 1e-2, "weight_decay": 0.1})
        master.grad = gradient.clone()
        plain.step()
    assert torch.equal(values, master)
    for name in OPTIMIZERS[kind].states:
        assert state[name].dtype == torch.bfloat16
        assert torch.equal(state[name].float(), kept[name])
