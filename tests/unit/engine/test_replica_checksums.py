"""Sums of bits, by which replicas are compared."""

from __future__ import annotations

import pytest
import torch

from bigtrain.engine.replica_checksums import sum_of_bits

INTEGERS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


@pytest.mark.parametrize("dtype", INTEGERS)
def test_each_flipped_bit_changes_the_sum(dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    usual = int(sum_of_bits(tensor))
    for bit in range(8 * tensor.element_size()):
        flipped = tensor.clone()
        integers = flipped.view(INTEGERS[dtype])
        one = torch.iinfo(integers.dtype).min if bit + 1 == 8 * tensor.element_size() else 1 << bit
        integers[1, 2] ^= one
        assert int(sum_of_bits(flipped)) != usual


def test_zeros_of_both_signs_and_nans_differ() -> None:
    zero, nan = torch.zeros(2), torch.full((2,), float("nan"))
    assert int(sum_of_bits(zero)) != int(sum_of_bits(torch.tensor([0.0, -0.0])))
    assert int(sum_of_bits(nan)) == int(sum_of_bits(nan.clone()))


def test_the_order_of_elements_and_strides_do_not_matter() -> None:
    tensor = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    assert int(sum_of_bits(tensor.T)) == int(sum_of_bits(tensor))
    assert sum_of_bits(torch.full((1 << 16,), -1.0)).dtype == torch.int64
