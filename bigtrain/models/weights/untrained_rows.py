"""Rows of an embedding or head that were never trained: zeros, copies of another row, the mean.

The logit of an untrained token is always 0, always the logit of another token, or always the mean
of all logits. So a model cannot generate the token, whatever its layers learn, unless the row is
trained.
"""

from __future__ import annotations

import torch

from bigtrain.models.weights.lazy_tensors import LazyTensor, allocate

_BLOCK_ROWS = 1024
_ZERO = 1e-16
"""Largest absolute value in a row of zeros, from Unsloth's check for untrained tokens."""
_NEAR_MEAN = 0.01
"""Share of the median distance from the mean row below which a row is the mean: new rows of
transformers' `resize_token_embeddings` are at a share of 3e-5, trained rows above a tenth."""
_PROJECTIONS = 64
"""Random projections of a row; they keep a proportion of distances within a third of its value."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def untrained_rows(table: LazyTensor) -> dict[int, str]:
    """Return the untrained rows of `table` [vocabulary, hidden size] by number, with a description
    of the row. Reads the table once, a block of rows at a time."""
    num_rows, width = int(table.shape[0]), int(table.shape[1])
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (width,), generator=generator)
    projection = torch.randn(width, _PROJECTIONS, generator=generator)
    # Zeros, a hash of every row's bits (sums of integers, which wrap), and random projections,
    # which keep the proportions of distances.
    largest, hashes, projected = [], [], []
    for begin in range(0, num_rows, _BLOCK_ROWS):
        rows = allocate((min(_BLOCK_ROWS, num_rows - begin), width), table.dtype)
        table.fill((begin, 0), rows)
        largest.append(rows.abs().amax(1).double())
        hashes.append((rows.view(_BITS[rows.element_size()]).long() * factors).sum(1))
        projected.append(rows.float() @ projection)
    points = torch.cat(projected).double()
    distance = (points - points.mean(0)).norm(dim=1)
    is_zero, is_mean = torch.cat(largest) <= _ZERO, distance <= _NEAR_MEAN * distance.median()
    # Equal rows are neighbours in the order of their hashes.
    sorted_hashes, order = torch.cat(hashes).sort(stable=True)
    is_same = (sorted_hashes[1:] == sorted_hashes[:-1]).tolist()
    reasons: dict[int, str] = {}
    first = 0
    numbers: list[int] = order.tolist()
    for index, number in enumerate(numbers):
        if index == 0 or not is_same[index - 1]:
            first = index
        if first < index:
            reasons.setdefault(numbers[first], f"the same as that of token {numbers[first + 1]}")
            reasons[number] = f"the same as that of token {numbers[first]}"
    for number in is_mean.nonzero().flatten().tolist():
        reasons.setdefault(number, "the mean of all rows")
    return reasons | dict.fromkeys(is_zero.nonzero().flatten().tolist(), "zeros")
