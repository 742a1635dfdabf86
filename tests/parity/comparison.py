"""Comparison of a trained case with plain PyTorch: losses, norms, and every weight."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from bigtrain.engine.checkpoint.io import read_full_masters
from tests.parity.plain import Training


def assert_same_steps(
    result: Mapping[str, Any], expected: Training, *, loss: float, norm: float
) -> None:
    """Compare the loss (absolute) and the gradient norm (relative) of every step."""
    assert result["losses"] == pytest.approx(expected.losses, abs=loss)
    assert result["norms"] == pytest.approx(expected.norms, rel=norm)


def assert_same_weights(
    place: Path, expected: Mapping[str, torch.Tensor], *, limit: float, buffers: str = "nothing"
) -> dict[str, torch.Tensor]:
    """Compare the masters saved in `place` with `expected`; returns them. Apart from those whose
    names end with `buffers`, both have the same names."""
    weights: dict[str, torch.Tensor] = read_full_masters(place / "tensors")
    others = {name for name in weights if name.endswith(buffers)}
    assert weights.keys() - others == expected.keys() - others
    for name, tensor in expected.items():
        assert float((tensor - weights[name]).abs().max()) <= limit, name
    return weights
