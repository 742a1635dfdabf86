"""The compilation of DeepSpeed's CUDA operators: what is compiled, and what nvcc reports."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.operator_proof import Compiled, compile_source, read_report, sources

REPORT = """\
ptxas info    : Compiling entry function '_Z1aPf' for 'sm_90'
ptxas info    : Function properties for _Z1aPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 48 registers, used 0 barriers
ptxas info    : Function properties for _Z1bPf
    8 bytes stack frame, 12 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers
"""


def test_every_operator_has_sources() -> None:
    listed = sources()
    assert {operator for operator, _, _ in listed} == {"fused_adam", "fused_lion", "quantizer"}
    assert all(source.is_file() for _, source, _ in listed)


def test_the_worst_kernel_counts() -> None:
    assert read_report(REPORT) == Compiled(num_kernels=2, registers=48, spilled_bytes=12)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
def test_a_source_that_does_not_compile_is_an_error(tmp_path: Path) -> None:
    kernel = "__global__ void twice(float* x) { x[threadIdx.x] *= 2; }\n"
    for text, is_right in ((kernel, True), (kernel.replace("x[", "y["), False)):
        source = tmp_path / f"{is_right}.cu"
        source.write_text(text)
        compiled = compile_source(source, [], tmp_path, 90)
        assert bool(compiled.error) != is_right, compiled.error
        assert compiled.num_kernels == int(is_right)
