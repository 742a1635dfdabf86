"""Attention of some queries to some keys with the log-sum-exp of the scores, and its gradients
from the log-sum-exp over all keys, by which a ring adds up attention block by block.

Forward: ``S = scale * q k'`` (with a soft cap ``c * tanh(S / c)``), ``lse = logsumexp(S)``, ``out =
exp(S - lse) v``. Backward (Dao 2023, arXiv 2307.08691, algorithm 2): with the output and
log-sum-exp over *all* keys, the gradients of a block are the block's part of the full gradients.

Where each query sees every key, or the keys up to its position, torch's flash kernels compute it:
on the CPU all dtypes, on CUDA float16 and bfloat16. All other blocks, narrow in a ring, are
computed in float32 tile by tile.

Shapes: B = samples, H = query heads, K = key heads that divide H, m = queries, n = keys, D = width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from bigtrain.models.torch_patches import flash_attention, flash_attention_gradients

TILE = 1024
"""Queries and keys of a tile: its float32 scores take 4 MiB per head."""

_FLASH_WIDTH = 256  # the widest head of flash attention 2


@dataclass(frozen=True)
class Band:
    """Keys that queries see: query i and key j are ``diagonal + i - j`` tokens apart, at least 0
    and below `window`. is_full: every query sees every key. is_causal: as in a causal mask of equal
    lengths."""

    diagonal: int
    window: int | None
    is_full: bool
    is_causal: bool


@dataclass(frozen=True)
class ScoreScaling:
    """Scale of the products of queries and keys, and soft cap of the result (Gemma 2)."""

    scale: float
    softcap: float | None = None


class AttentionStates(NamedTuple):
    """Queries [B, H, m, D], keys [B, K, n, D] and values [B, K, n, Dv], or their gradients."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class AttentionOutput(NamedTuple):
    """Output [B, H, m, Dv] of queries, and the log-sum-exp of the scores, float32 [B, H, m]; -inf
    for a query that sees no key."""

    out: torch.Tensor
    lse: torch.Tensor


def attend(states: AttentionStates, band: Band, scores: ScoreScaling) -> AttentionOutput:
    """Return the attention of the queries to the keys, float32."""
    if not _has_kernel(states, band, scores):
        return _attend_in_tiles(states, band, scores)
    copies, queries = _grouped(states, is_causal=band.is_causal)
    out, lse = flash_attention(
        queries,
        _repeated(states.key, copies),
        _repeated(states.value, copies),
        is_causal=band.is_causal,
        scale=scores.scale,
    )
    shape = states.query.shape[:3]
    return AttentionOutput(out.reshape(*shape, -1).float(), lse.reshape(shape).float())


def gradients(
    states: AttentionStates,
    output: AttentionOutput,
    grad_out: torch.Tensor,
    band: Band,
    scores: ScoreScaling,
) -> AttentionStates:
    """Return the gradients of `states` from this block, float32, for the gradient `grad_out` of the
    output. `output`: over all keys, not only the block's."""
    if not _has_kernel(states, band, scores):
        return _gradients_in_tiles(states, output, grad_out, band, scores)
    copies, queries = _grouped(states, is_causal=band.is_causal)
    rows = queries.shape[:3]
    kernel_gradients = flash_attention_gradients(
        grad_out.reshape(*rows, -1),
        (queries, _repeated(states.key, copies), _repeated(states.value, copies)),
        output.out.reshape(*rows, -1),
        output.lse.reshape(rows),
        is_causal=band.is_causal,
        scale=scores.scale,
    )
    grad_query, grad_key, grad_value = (x.float() for x in kernel_gradients)
    if copies > 1:
        grad_key, grad_value = (x.unflatten(1, (-1, copies)).sum(2) for x in (grad_key, grad_value))
    return AttentionStates(grad_query.reshape(states.query.shape), grad_key, grad_value)


def _has_kernel(states: AttentionStates, band: Band, scores: ScoreScaling) -> bool:
    """Return whether torch's flash kernels compute the block."""
    width = states.query.shape[-1]
    is_plain = (band.is_full or band.is_causal) and scores.softcap is None
    if not is_plain or width != states.value.shape[-1]:
        return False
    is_half = states.query.dtype in (torch.float16, torch.bfloat16)
    on_cuda = is_half and width <= _FLASH_WIDTH and width % 8 == 0
    return on_cuda or states.query.device.type == "cpu"


def _grouped(states: AttentionStates, *, is_causal: bool) -> tuple[int, torch.Tensor]:
    """Return how often keys are repeated for the queries, and the queries: without a mask, the
    queries of a key head's query heads are rows of a single head, and no key is repeated."""
    query, key, _ = states
    groups = query.shape[1] // key.shape[1]
    if is_causal:
        return groups, query.contiguous()
    return 1, query.reshape(query.shape[0], key.shape[1], -1, query.shape[-1])


def _repeated(states: torch.Tensor, copies: int) -> torch.Tensor:
    return states.repeat_interleave(copies, dim=1) if copies > 1 else states.contiguous()


@dataclass(frozen=True)
class _Tile:
    """Scores of rows and columns of a block, float32 [B, K, H / K, rows, columns]. slope: the
    derivative of the soft cap."""

    rows: slice
    columns: slice
    scores: torch.Tensor
    slope: torch.Tensor | None


def _tiles(
    query: torch.Tensor, key: torch.Tensor, band: Band, scores: ScoreScaling
) -> Iterator[_Tile]:
    """Yield the tiles in which a query sees a key; `query` [B, K, H / K, m, D], float32."""
    # Rows and columns of a tile are `nearest` to `farthest` tokens apart.
    num_rows, num_columns = query.shape[-2], key.shape[-2]
    for first_row in range(0, num_rows, TILE):
        rows = slice(first_row, min(first_row + TILE, num_rows))
        for first_column in range(0, num_columns, TILE):
            columns = slice(first_column, min(first_column + TILE, num_columns))
            nearest = band.diagonal + rows.start - columns.stop + 1
            farthest = band.diagonal + rows.stop - 1 - columns.start
            if farthest < 0 or (band.window is not None and nearest >= band.window):
                continue
            # S = scale * q k', or c * tanh(S / c), whose derivative is 1 - tanh(S / c)^2.
            part = query[..., rows, :] @ key[:, :, None, columns].mT * scores.scale
            slope = None
            if scores.softcap is not None:
                part = torch.tanh(part / scores.softcap)
                slope = 1 - part.square()
                part = part * scores.softcap
            # The mask, in a tile at the diagonal or at the end of the window.
            if nearest < 0 or (band.window is not None and farthest >= band.window):
                row = torch.arange(rows.start, rows.stop, device=query.device)[:, None]
                column = torch.arange(columns.start, columns.stop, device=query.device)
                distance = band.diagonal + row - column
                hidden = distance < 0
                if band.window is not None:
                    hidden |= distance >= band.window
                part = part.masked_fill(hidden, -torch.inf)
            yield _Tile(rows, columns, part, slope)


def _attend_in_tiles(states: AttentionStates, band: Band, scores: ScoreScaling) -> AttentionOutput:
    shape, groups = states.query.shape[:3], (states.key.shape[1], -1)
    query = states.query.float().unflatten(1, groups)
    key, value = states.key.float(), states.value.float()
    out = query.new_zeros(*query.shape[:-1], value.shape[-1])
    lse = query.new_full(query.shape[:-1], -torch.inf)
    for tile in _tiles(query, key, band, scores):
        tile_lse = tile.scores.logsumexp(-1)
        weights = (tile.scores - finite(tile_lse)[..., None]).exp()
        # In place, into views of `out` and `lse`.
        merge(
            AttentionOutput(out[..., tile.rows, :], lse[..., tile.rows]),
            AttentionOutput(weights @ value[:, :, None, tile.columns], tile_lse),
        )
    return AttentionOutput(out.reshape(*shape, -1), lse.reshape(shape))


def _gradients_in_tiles(
    states: AttentionStates,
    output: AttentionOutput,
    grad_out: torch.Tensor,
    band: Band,
    scores: ScoreScaling,
) -> AttentionStates:
    groups = (states.key.shape[1], -1)
    query, grad_out, out = (
        x.float().unflatten(1, groups) for x in (states.query, grad_out, output.out)
    )
    lse = finite(output.lse.unflatten(1, groups))
    key, value = states.key.float(), states.value.float()
    # Dao 2023 (arXiv 2307.08691), algorithm 2: D = rowsum(dO * O), P = exp(S - lse),
    # dV = P' dO, dS = P * (dO V' - D), dQ = scale * dS K, dK = scale * dS' Q.
    delta = (grad_out * out).sum(-1, keepdim=True)
    grad_query, grad_key, grad_value = (torch.zeros_like(x) for x in (query, key, value))
    for tile in _tiles(query, key, band, scores):
        rows, columns = tile.rows, tile.columns
        weights = (tile.scores - lse[..., rows, None]).exp()
        tile_grad_out = grad_out[..., rows, :]
        grad_value[:, :, columns] += (weights.mT @ tile_grad_out).sum(2)
        grad_weights = tile_grad_out @ value[:, :, None, columns].mT
        grad_scores = weights * (grad_weights - delta[..., rows, :])
        if tile.slope is not None:
            grad_scores = grad_scores * tile.slope
        grad_scores = grad_scores * scores.scale
        grad_query[..., rows, :] += grad_scores @ key[:, :, None, columns]
        grad_key[:, :, columns] += (grad_scores.mT @ query[..., rows, :]).sum(2)
    return AttentionStates(grad_query.reshape(states.query.shape), grad_key, grad_value)


def merge(total: AttentionOutput, added: AttentionOutput) -> None:
    """Add attention to further keys, `added`, to `total`, in place. All are float32 [..., m, D] and
    [..., m]. ``lse = log(exp(lse1) + exp(lse2))``, ``out = sum of exp(lse_i - lse) out_i``."""
    lse = torch.logaddexp(total.lse, added.lse)
    shift = finite(lse)
    added_out = added.out * (added.lse - shift).exp()[..., None]
    total.out.mul_((total.lse - shift).exp()[..., None]).add_(added_out)
    total.lse.copy_(lse)


def finite(lse: torch.Tensor) -> torch.Tensor:
    """Return `lse` with 0 for a query that sees no key, so that its weights are 0, not NaN."""
    return lse.masked_fill(lse == -torch.inf, 0.0)
