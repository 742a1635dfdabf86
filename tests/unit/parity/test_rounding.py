"""Sums in another order give the same to rounding, and not the same bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bigtrain.parity.sums_in_parts import SumsInParts


def test_sums_in_parts() -> None:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(3, 5, 64, generator=generator, requires_grad=True)
    weight = torch.randn(32, 64, generator=generator, requires_grad=True)
    bias = torch.randn(32, generator=generator, requires_grad=True)

    def run() -> list[torch.Tensor]:
        output = F.linear(states, weight, bias)
        return [output, *torch.autograd.grad(output.square().sum(), [states, weight, bias])]

    plain = run()
    with SumsInParts(1):
        whole = run()
    with SumsInParts(3):
        parts = run()
    for one, same, other in zip(plain, whole, parts, strict=True):
        assert torch.allclose(one, same, rtol=1e-5, atol=1e-4)
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-4)
    assert any(not torch.equal(one, other) for one, other in zip(plain, parts, strict=True))
