"""Newton-Schulz iterations against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.optim import _muon

from bigtrain.engine.optimizers.muon import cost, orthogonalized

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@pytest.mark.parametrize("shape", [(1, 8), (48, 16), (16, 48), (64, 256)])
def test_is_that_of_torch(shape: tuple[int, int]) -> None:
    """To the bit where sums are short; of longer ones a few round to the neighbour."""
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 1e-3
    expected = _muon._zeropower_via_newtonschulz(gradient, COEFFICIENTS, 5, 1e-7)
    update = orthogonalized(gradient.bfloat16(), COEFFICIENTS, 5, 1e-7)
    assert update.dtype == torch.bfloat16
    if max(shape) < 64:
        assert torch.equal(update, expected)
    assert float((update - expected).abs().max()) < 0.01 * float(expected.abs().max())
    assert float((update != expected).double().mean()) < 0.5


def test_several_at_once() -> None:
    matrices = torch.randn(3, 24, 8, generator=torch.Generator().manual_seed(2))
    together = orthogonalized(matrices, COEFFICIENTS, 5, 1e-7)
    for matrix, result in zip(matrices, together, strict=True):
        torch.testing.assert_close(result, orthogonalized(matrix, COEFFICIENTS, 5, 1e-7))


def test_singular_values_come_to_lie_about_one() -> None:
    assert not orthogonalized(torch.zeros(4, 8), COEFFICIENTS, 5, 1e-7).any()
    matrix = torch.randn(32, 64, generator=torch.Generator().manual_seed(3))
    values = torch.linalg.svdvals(orthogonalized(matrix, COEFFICIENTS, 5, 1e-7))
    assert 0.6 < float(values.min()) < float(values.max()) < 1.3


def test_the_short_side_is_what_costs() -> None:
    assert cost(8, 64, 5) == cost(64, 8, 5) == 5 * (4 * 8 * 8 * 64 + 2 * 8**3)
