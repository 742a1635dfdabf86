"""Comparison of a model or a trained case with plain PyTorch: losses, norms, gradients, weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bigtrain.engine.checkpoint.io import read_full_masters

if TYPE_CHECKING:
    from tests.parity.plain import Training

Tensors = Mapping[str, torch.Tensor]


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradient of `loss` by parameter, of those that have one."""
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_tensors(
    tensors: Tensors, expected: Tensors, *, limit: float, relative: float = 0.0
) -> None:
    """Compare each tensor of `expected`: it may differ by `limit`, and by `relative` of its
    value."""
    assert expected
    for name, tensor in expected.items():
        torch.testing.assert_close(
            tensors[name],
            tensor,
            rtol=relative,
            atol=limit,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def assert_same_steps(
    result: Mapping[str, Any], expected: Training, *, loss: float, norm: float
) -> None:
    """Compare the loss (absolute) and the gradient norm (relative) of every step."""
    assert result["losses"] == pytest.approx(expected.losses, abs=loss)
    assert result["norms"] == pytest.approx(expected.norms, rel=norm)


def assert_same_weights(
    place: Path,
    expected: Tensors,
    *,
    limit: float,
    relative: float = 0.0,
    buffers: str = "nothing",
) -> dict[str, torch.Tensor]:
    """Compare the masters saved in `place` with `expected`; returns them. Apart from those whose
    names end with `buffers`, both have the same names."""
    weights: dict[str, torch.Tensor] = read_full_masters(place / "tensors")
    others = {name for name in weights if name.endswith(buffers)}
    assert weights.keys() - others == expected.keys() - others
    assert_same_tensors(weights, expected, limit=limit, relative=relative)
    return weights
