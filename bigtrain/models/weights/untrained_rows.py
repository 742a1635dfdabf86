"""Rows of an embedding or head that were never trained: zeros, copies of another row, the mean.

The logit of an untrained token is always 0, always the logit of another token, or always the mean
of all logits. So a model cannot generate the token, whatever its layers learn, unless the row is
trained.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from bigtrain.models.weights.lazy_tensors import LazyTensor, allocate

_BLOCK_ROWS = 1024
_ZERO = 1e-16
"""Largest absolute value in a row of zeros, from Unsloth's check for untrained tokens."""
_NEAR_MEAN = 0.01
"""Share of the median distance from the mean row below which a row is the mean: new rows of
transformers' `resize_token_embeddings` are at a share of 3e-5, trained rows above a tenth."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def untrained_rows(table: LazyTensor, ids: Collection[int]) -> dict[int, str]:
    """Return the untrained rows of `table` [vocabulary, hidden size] among `ids`, with a
    description of the row. Reads the table twice, a block of rows at a time."""
    row_numbers = sorted(number for number in ids if number < table.shape[0])
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (int(table.shape[1]),), generator=generator)
    # First pass: zeros, a hash of every row's bits (sums of integers, which wrap), the mean.
    largest, hashes = [], []
    total = torch.zeros(int(table.shape[1]), dtype=torch.float64)
    for rows in _blocks(table):
        largest.append(rows.abs().amax(1).double())
        hashes.append((rows.view(_BITS[rows.element_size()]).long() * factors).sum(1))
        total += rows.double().sum(0)
    mean = (total / table.shape[0]).float()
    # Second pass: distances from the mean.
    distance = torch.cat([(rows.float() - mean).square().sum(1).sqrt() for rows in _blocks(table)])
    is_zero, is_mean = torch.cat(largest) <= _ZERO, distance <= _NEAR_MEAN * distance.median()
    _, groups, counts = torch.cat(hashes).unique(return_inverse=True, return_counts=True)
    reasons: dict[int, str] = {}
    for number in row_numbers:
        if is_zero[number]:
            reasons[number] = "zeros"
        elif counts[groups[number]] > 1:
            copies = (groups == groups[number]).nonzero().flatten().tolist()
            copy = next(row for row in copies if row != number)
            reasons[number] = f"the same as that of token {copy}"
        elif is_mean[number]:
            reasons[number] = "the mean of all rows"
    return reasons


def _blocks(table: LazyTensor) -> Iterator[torch.Tensor]:
    """Yield the rows of `table` in blocks."""
    for low in range(0, int(table.shape[0]), _BLOCK_ROWS):
        num_rows = min(_BLOCK_ROWS, int(table.shape[0]) - low)
        rows = allocate((num_rows, int(table.shape[1])), table.dtype)
        table.fill((low, 0), rows)
        yield rows
