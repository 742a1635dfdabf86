"""Orthogonalizing a matrix by Newton-Schulz iterations."""

from __future__ import annotations

import torch

Coefficients = tuple[float, float, float]


def orthogonalized(
    matrices: torch.Tensor, coefficients: Coefficients, num_steps: int, eps: float
) -> torch.Tensor:
    """Approximately U V^T of each matrix U S V^T: singular values end near 1, not at it.

    The iteration X <- a X + (b A + c A A) X, with A = X X^T, of `torch.optim.Muon` (Jordan 2024,
    https://kellerjordan.github.io/posts/muon/), in the dtype of `matrices` [..., rows, columns].
    """
    a, b, c = coefficients
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(num_steps):
        gram = _fused(None, x, x.mT)
        update = _fused(gram, gram, gram, b, c)
        x = _fused(x, update, x, a, 1.0)
    return x.mT if is_tall else x


def _fused(
    added: torch.Tensor | None,
    left: torch.Tensor,
    right: torch.Tensor,
    beta: float = 1.0,
    alpha: float = 1.0,
) -> torch.Tensor:
    """beta added + alpha left right.

    On a CPU in 16 bit it computes in float32 and rounds the result: the same as the CPU's own
    16-bit products, which are thirty times slower if the processor has no instruction for them.
    """
    if left.dtype != torch.float32 and left.device.type == "cpu":
        wide = None if added is None else added.float()
        return _fused(wide, left.float(), right.float(), beta, alpha).to(left.dtype)
    if added is None:
        return left @ right
    product = torch.addmm if added.ndim == 2 else torch.baddbmm
    return product(added, left, right, beta=beta, alpha=alpha)


def cost(rows: int, columns: int, num_steps: int) -> int:
    """Floating-point operations of `orthogonalized` on one matrix."""
    short, long = sorted((rows, columns))
    return num_steps * (4 * short * short * long + 2 * short**3)
