"""The check of Triton kernels finds wrong ones; `make kernel-proof` runs it on Liger's."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks import kernel_proof
from benchmarks.kernel_proof import Case, Distances
from tests.support.worlds import ROOT


class Product(torch.autograd.Function):
    """SwiGLU with a factor on its result or on a gradient."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any, result: float, gradient: float) -> Any:
        ctx.save_for_backward(a, b)
        ctx.gradient = gradient
        return F.silu(a) * b * result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        a, b = ctx.saved_tensors
        s = torch.sigmoid(a)
        by_a = gradients[0] * b * s * (1 + a * (1 - s))
        by_b = gradients[0] * F.silu(a) * ctx.gradient
        a.copy_(by_a)  # as Liger's kernels do
        return a, by_b, None, None


@pytest.mark.parametrize(
    ("result", "gradient", "is_rounding"),
    [(1.0, 1.0, True), (1 + 1e-5, 1.0, False), (1.0, 1 - 1e-5, False)],
)
def test_wrong_results_and_gradients_are_found(
    result: float, gradient: float, is_rounding: bool
) -> None:
    case = Case(
        "product",
        lambda: [torch.randn(3, 50, requires_grad=True) for _ in range(2)],
        lambda a, b: Product.apply(a, b, result, gradient),
        lambda a, b: F.silu(a) * b,
    )
    assert kernel_proof.distances(case).is_rounding is is_rounding


def test_another_order_of_sums_is_rounding() -> None:
    assert Distances(1.4e-5, 6.5e-6, 1).is_rounding
    assert not Distances(3e-5, 6.5e-6, 1).is_rounding
    assert not Distances(2e-6, 1e-7, 1).is_rounding


def test_a_sum_over_a_vocabulary_in_order_is_rounding_for_any_threads_of_pytorch() -> None:
    # 128,256 terms in order differ by 3.2e-5 from float64; PyTorch by 3.2e-5 or 4e-6.
    assert Distances(3.2e-5, 3.9e-6, kernel_proof.LARGE.vocabulary).is_rounding
    assert not Distances(1e-4, 3.9e-6, kernel_proof.LARGE.vocabulary).is_rounding
    assert not Distances(1e-5, 4e-7, kernel_proof.SMALL.vocabulary).is_rounding


def test_a_product_of_blocks_that_leaves_out_a_block_is_found() -> None:
    """As a kernel whose grid is one block short over the vocabulary."""
    vocabulary, block = kernel_proof.LARGE.vocabulary, 64

    def without_last_block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.logsumexp(x @ weight[: vocabulary - block].t(), dim=-1)

    case = Case(
        "logsumexp",
        lambda: [torch.randn(n, 4, requires_grad=True) for n in (2, vocabulary)],
        without_last_block,
        lambda x, weight: torch.logsumexp(x @ weight.t(), dim=-1),
        vocabulary,
    )
    assert not kernel_proof.distances(case).is_rounding


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: make kernel-proof"
)
def test_kernels_compile_and_compute_what_pytorch_does() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "benchmarks.kernel_proof", "--interpret"],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    results = json.loads(finished.stdout)
    assert len(results) == len(kernel_proof.cases(kernel_proof.SMALL))
    for one in results:
        assert all(Distances(**each).is_rounding for each in one["distances"]), one["case"]
    launch = results[0]["launches"][0]
    assert kernel_proof.compile_launch(launch, "bf16", 90).registers > 0


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: make kernel-proof"
)
def test_flex_attention_compiles_forward_and_backward() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.flex_proof", "90"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    rows = json.loads(result.stdout.splitlines()[-1])
    assert [row["way"] for row in rows] == 2 * ["forward", "backward"]
    assert all(0 < row["registers"] < 256 for row in rows)
