"""Attention of some queries to some keys with the log-sum-exp of their scores, and its gradients
from the log-sum-exp over all keys: what a ring needs to add up attention block by block.

Forward: ``S = scale * q k'`` (with a soft cap ``c * tanh(S / c)``), ``lse = logsumexp(S)``, ``out =
exp(S - lse) v``. Backward (Dao 2023, arXiv 2307.08691, algorithm 2): with the output and
log-sum-exp over *all* keys, the gradients of a block are its part of the full ones.

Where each query sees every key, or those up to its own, torch's own flash kernels compute it: on
the CPU all dtypes, on CUDA float16 and bfloat16. Everything else, narrow in a ring, is computed in
float32 tile by tile.

Shapes: B = samples, H = query heads, K = key heads that divide H, m = queries, n = keys, D = width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bigtrain.models.torch_patches import flash_attention, flash_attention_gradients

TILE = 1024
"""Queries and keys of a tile: its float32 scores take 4 MiB per head."""

_FLASH_WIDTH = 256  # the widest head of flash attention 2


@dataclass(frozen=True)
class Band:
    """Keys that queries see: query i and key j are ``diagonal + i - j`` tokens apart, at least 0
    and below `window`. is_full: all of them. is_causal: as in a causal mask of equal lengths."""

    diagonal: int
    window: int | None
    is_full: bool
    is_causal: bool


@dataclass(frozen=True)
class ScoreScaling:
    """Scale of the products of queries and keys, and soft cap of the result (Gemma 2)."""

    scale: float
    softcap: float | None = None


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, band: Band, scores: ScoreScaling
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output float32 [B, H, m, Dv] of queries [B, H, m, D] to keys [B, K, n, D], and
    the log-sum-exp of their scores, float32 [B, H, m]; -inf for a query that sees none."""
    if not _has_kernel(query, value, band, scores):
        return _attend_in_tiles(query, key, value, band, scores)
    copies, queries = _grouped(query, key, is_causal=band.is_causal)
    out, lse = flash_attention(
        queries,
        _repeated(key, copies),
        _repeated(value, copies),
        is_causal=band.is_causal,
        scale=scores.scale,
    )
    shape = query.shape[:3]
    return out.reshape(*shape, -1).float(), lse.reshape(shape).float()


def gradients(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    band: Band,
    scores: ScoreScaling,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value from this block, float32. `out` [B, H, m, Dv]
    and `lse` [B, H, m] are those over all keys."""
    if not _has_kernel(query, value, band, scores):
        return _gradients_in_tiles(grad_out, query, key, value, out, lse, band, scores)
    copies, queries = _grouped(query, key, is_causal=band.is_causal)
    rows = queries.shape[:3]
    kernel_gradients = flash_attention_gradients(
        grad_out.reshape(*rows, -1),
        (queries, _repeated(key, copies), _repeated(value, copies)),
        out.reshape(*rows, -1),
        lse.reshape(rows),
        is_causal=band.is_causal,
        scale=scores.scale,
    )
    of_query, of_key, of_value = (x.float() for x in kernel_gradients)
    if copies > 1:
        of_key, of_value = (x.unflatten(1, (-1, copies)).sum(2) for x in (of_key, of_value))
    return of_query.reshape(query.shape), of_key, of_value


def _has_kernel(query: torch.Tensor, value: torch.Tensor, band: Band, scores: ScoreScaling) -> bool:
    """Return whether torch's flash kernels compute the block."""
    width = query.shape[-1]
    is_plain = (band.is_full or band.is_causal) and scores.softcap is None
    if not is_plain or width != value.shape[-1]:
        return False
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    on_cuda = is_half and width <= _FLASH_WIDTH and width % 8 == 0
    return on_cuda or query.device.type == "cpu"


def _grouped(
    query: torch.Tensor, key: torch.Tensor, *, is_causal: bool
) -> tuple[int, torch.Tensor]:
    """Return how often keys are repeated for `query`, and the queries: without a mask, those of
    all heads of a key head are rows of one head, and no key is repeated."""
    groups = query.shape[1] // key.shape[1]
    if is_causal:
        return groups, query.contiguous()
    return 1, query.reshape(query.shape[0], key.shape[1], -1, query.shape[-1])


def _repeated(states: torch.Tensor, copies: int) -> torch.Tensor:
    return states.repeat_interleave(copies, dim=1) if copies > 1 else states.contiguous()


@dataclass(frozen=True)
class _Tile:
    """Scores of some rows and columns of a block, float32 [B, K, H / K, rows, columns]. slope: the
    derivative of the soft cap."""

    rows: slice
    columns: slice
    scores: torch.Tensor
    slope: torch.Tensor | None


def _tiles(
    query: torch.Tensor, key: torch.Tensor, band: Band, scores: ScoreScaling
) -> Iterator[_Tile]:
    """Yield the tiles in which a query sees a key; `query` [B, K, H / K, m, D], float32."""
    num_rows, num_columns = query.shape[-2], key.shape[-2]
    for top in range(0, num_rows, TILE):
        rows = slice(top, min(top + TILE, num_rows))
        for left in range(0, num_columns, TILE):
            columns = slice(left, min(left + TILE, num_columns))
            nearest = band.diagonal + rows.start - columns.stop + 1
            farthest = band.diagonal + rows.stop - 1 - columns.start
            if farthest < 0 or (band.window is not None and nearest >= band.window):
                continue
            part = query[..., rows, :] @ key[:, :, None, columns].mT * scores.scale
            slope = None
            if scores.softcap is not None:
                part = torch.tanh(part / scores.softcap)
                slope = 1 - part.square()
                part = part * scores.softcap
            if nearest < 0 or (band.window is not None and farthest >= band.window):
                row = torch.arange(rows.start, rows.stop, device=query.device)[:, None]
                distance = (
                    band.diagonal
                    + row
                    - torch.arange(columns.start, columns.stop, device=query.device)
                )
                hidden = distance < 0
                if band.window is not None:
                    hidden |= distance >= band.window
                part = part.masked_fill(hidden, -torch.inf)
            yield _Tile(rows, columns, part, slope)


def _attend_in_tiles(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, band: Band, scores: ScoreScaling
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = query.shape[:3]
    query = query.float().unflatten(1, (key.shape[1], -1))
    key, value = key.float(), value.float()
    out = query.new_zeros(*query.shape[:-1], value.shape[-1])
    lse = query.new_full(query.shape[:-1], -torch.inf)
    for tile in _tiles(query, key, band, scores):
        part = tile.scores.logsumexp(-1)
        weights = (tile.scores - finite(part)[..., None]).exp()
        merge(
            out[..., tile.rows, :],
            lse[..., tile.rows],
            weights @ value[:, :, None, tile.columns],
            part,
        )
    return out.reshape(*shape, -1), lse.reshape(shape)


def _gradients_in_tiles(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    band: Band,
    scores: ScoreScaling,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape, groups = query.shape, (key.shape[1], -1)
    query, grad_out, out = (x.float().unflatten(1, groups) for x in (query, grad_out, out))
    lse = finite(lse.unflatten(1, groups))
    key, value = key.float(), value.float()
    delta = (grad_out * out).sum(-1, keepdim=True)
    of_query, of_key, of_value = (torch.zeros_like(x) for x in (query, key, value))
    for tile in _tiles(query, key, band, scores):
        rows, columns = tile.rows, tile.columns
        weights = (tile.scores - lse[..., rows, None]).exp()
        grads = grad_out[..., rows, :]
        of_value[:, :, columns] += (weights.mT @ grads).sum(2)
        of_scores = weights * (grads @ value[:, :, None, columns].mT - delta[..., rows, :])
        if tile.slope is not None:
            of_scores = of_scores * tile.slope
        of_scores = of_scores * scores.scale
        of_query[..., rows, :] += of_scores @ key[:, :, None, columns]
        of_key[:, :, columns] += (of_scores.mT @ query[..., rows, :]).sum(2)
    return of_query.reshape(shape), of_key, of_value


def merge(
    out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, lse_of_more: torch.Tensor
) -> None:
    """Add attention to further keys to `out` [..., m, D] with log-sum-exp `lse` [..., m], in
    place. All are float32; -inf is no key."""
    total = torch.logaddexp(lse, lse_of_more)
    known = finite(total)
    out.mul_((lse - known).exp()[..., None]).add_(more * (lse_of_more - known).exp()[..., None])
    lse.copy_(total)


def finite(lse: torch.Tensor) -> torch.Tensor:
    """Return `lse` with 0 for a query that sees no key, so that its weights are 0, not NaN."""
    return lse.masked_fill(lse == -torch.inf, 0.0)
