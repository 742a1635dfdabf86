"""DeepSpeed's CUDA operators, compiled without a GPU.

    make operator-proof

Compiles every CUDA source of the operators that a run of bigtrain can reach (fused Adam and Lion,
and ZeRO++'s quantization) by nvcc for compute capability 8.0 (A100), 9.0 (H100) and 10.0 (B200),
with the headers of pip's torch and NVIDIA's packages, and prints registers and spilled bytes. Exit
code 1 where one does not compile, 2 without nvcc. Nothing here shows what a GPU computes.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import deepspeed
import torch
from deepspeed.ops.op_builder.fused_adam import FusedAdamBuilder
from deepspeed.ops.op_builder.fused_lion import FusedLionBuilder
from deepspeed.ops.op_builder.quantizer import QuantizerBuilder

CAPABILITIES = (80, 90, 100)
HEADERS = ("cublas", "cuda-runtime", "curand", "cusolver", "cusparse")
"""NVIDIA's packages on PyPI whose headers torch's include (nvidia-NAME)."""
_BUILDERS = (FusedAdamBuilder, FusedLionBuilder, QuantizerBuilder)
_PACKAGE = Path(deepspeed.__file__).parent / "ops"
_MACROS = "c10/cuda/impl/cuda_cmake_macros.h"  # torch's builds for CPUs lack this generated header


@dataclass(frozen=True)
class Compiled:
    """Kernels of a source for one capability: their number, the most registers of a thread, and the
    most spilled bytes; error: of nvcc, if it did not compile."""

    num_kernels: int = 0
    registers: int = 0
    spilled_bytes: int = 0
    error: str = ""


def fetch_headers(folder: Path) -> Path:
    """Return the folder of NVIDIA's headers below `folder`; fetched by pip where there are none."""
    headers = sorted(folder.glob("nvidia/*/include"))
    if not headers:
        wheels = folder / "wheels"
        names = [f"nvidia-{name}" for name in HEADERS]
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels)]
        subprocess.run([*command, *names], check=True)
        for wheel in wheels.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder, [n for n in archive.namelist() if "/include/" in n])
        shutil.rmtree(wheels)
        headers = sorted(folder.glob("nvidia/*/include"))
    macros = headers[0] / _MACROS
    macros.parent.mkdir(parents=True, exist_ok=True)
    macros.write_text("#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n")
    return headers[0]


def sources() -> list[tuple[str, Path, list[str]]]:
    """Return operator, CUDA source and folders of headers of each compilation."""
    listed = []
    for kind in _BUILDERS:
        builder = kind()
        folders = [str(_PACKAGE / path) for path in builder.include_paths()]
        cuda = [_PACKAGE / path for path in builder.sources() if path.endswith(".cu")]
        listed += [(builder.name, path, folders) for path in cuda]
    return listed


def compile_source(
    source: Path, folders: Sequence[str], headers: Path, capability: int
) -> Compiled:
    """Compile one file to machine code that is not kept."""
    own = Path(torch.__file__).parent / "include"
    system = [own, own / "torch/csrc/api/include", headers, sysconfig.get_path("include")]
    command = [
        *("nvcc", "-c", "-O3", "-std=c++20", "-Xptxas", "-v", "-o", "/dev/null"),
        *("--use_fast_math", "--expt-relaxed-constexpr", "-DTORCH_EXTENSION_NAME=proof"),
        *("-DBF16_AVAILABLE", "-DVERSION_GE_1_1", "-DVERSION_GE_1_3", "-DVERSION_GE_1_5"),
        f"-gencode=arch=compute_{capability},code=sm_{capability}",
        *(f"-I{folder}" for folder in folders),
        *(word for folder in system for word in ("-isystem", str(folder))),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line]
        return Compiled(error=(lines or ["nvcc failed"])[0])
    return read_report(done.stderr)


def read_report(text: str) -> Compiled:
    """Read what ptxas reports of each kernel."""
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", text)]
    spilled = [int(number) for number in re.findall(r"(\d+) bytes spill stores", text)]
    return Compiled(len(registers), max(registers, default=0), max(spilled, default=0))


def main(argv: Sequence[str] | None = None) -> int:
    """Compile all sources; print the table of docs/gpu_proof.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--headers", type=Path, default=Path(".kernel-packages/headers"))
    args = parser.parse_args(argv)
    if shutil.which("nvcc") is None:
        parser.error("nvcc is not on PATH: install CUDA's compiler")
    headers = fetch_headers(args.headers)
    version = importlib.metadata.version("deepspeed")
    print(f"DeepSpeed {version}; kernels, most registers, most spilled bytes:\n")
    print("| operator | source | " + " | ".join(f"sm_{c}" for c in CAPABILITIES) + " | s |")
    print("|---|---|" + "---|" * (len(CAPABILITIES) + 1))
    failed = False
    for operator, source, folders in sources():
        begun = time.monotonic()
        cells = []
        for capability in CAPABILITIES:
            one = compile_source(source, folders, headers, capability)
            failed |= bool(one.error)
            numbers = f"{one.num_kernels}, {one.registers}, {one.spilled_bytes}"
            cells.append(one.error or numbers)
        seconds = time.monotonic() - begun
        print(
            f"| `{operator}` | `{source.name}` | {' | '.join(cells)} | {seconds:.0f} |", flush=True
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
