"""Triton kernels of GPU runs, without a GPU: run in Triton's interpreter, and compiled.

    make kernel-proof

Every kernel of liger-kernel that ``model.kernels: liger`` and ``model.loss: liger`` launch runs in
the interpreter on CPU tensors, forward and backward, at small widths and at those of Llama 3 8B.
Its distance from PyTorch in float64 is compared with the distance of PyTorch in float32, and with
the rounding of the operation's longest sum. The launches at large widths are recorded, and the
kernels compiled for them in float32 and bfloat16, to PTX by Triton and to machine code by its
ptxas, for compute capability 8.0 (A100), 9.0 (H100) and 10.0 (B200): registers, spilled bytes,
shared memory; so are flex attention's (`flex_proof.py`). Nothing here shows how fast a kernel is,
or what a GPU computes.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

CAPABILITIES = (80, 90, 100)
TOLERANCE = 1e-6
"""Of the largest value, for which plain float32 may happen to be exact."""
MOST_TIMES_ROUNDING = 4.0
"""Of the distance of plain float32, and of the rounding of the longest sum, whichever is larger."""
_POINTERS = {"torch.float32": "*fp32", "torch.int64": "*i64", "torch.bfloat16": "*bf16"}
_OPTIONS = ("num_warps", "num_stages", "num_ctas")


@dataclass(frozen=True)
class Case:
    """One operation. ours, plain: of the same inputs, of which some have gradients. num_terms: of
    the longest sum of a result or a gradient."""

    name: str
    inputs: Callable[[], list[torch.Tensor]]
    ours: Callable[..., Any]
    plain: Callable[..., Any]
    num_terms: int = 1


@dataclass(frozen=True)
class Sizes:
    """Widths of a model: of hidden states, feed-forward layers, heads, and the vocabulary."""

    hidden: int
    intermediate: int
    num_heads: int
    head: int
    vocabulary: int


SMALL = Sizes(96, 100, 4, 16, 97)
"""No width fills a block."""
LARGE = Sizes(4096, 14336, 32, 128, 128256)
"""Of Llama 3 8B; the vocabulary needs several blocks."""


def cases(sizes: Sizes) -> list[Case]:
    """Return the operations that bigtrain replaces by Liger's, on a few tokens."""
    importlib.import_module("bigtrain.models")  # keeps torchao out of transformers' imports
    ops = importlib.import_module("liger_kernel.ops")
    hidden, wide, head = sizes.hidden, sizes.intermediate, sizes.head
    targets = torch.tensor([1, 40, -100, sizes.vocabulary - 1, 0, 7, -100])

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, requires_grad=True)

    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin

    def rotary_inputs() -> list[torch.Tensor]:
        angles = torch.randn(1, 5, head // 2)
        both = torch.cat([angles, angles], dim=-1)
        query, key = (random(2, n, 5, head) for n in (sizes.num_heads, sizes.num_heads // 2))
        return [query, key, both.cos(), both.sin()]

    def gemma_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (hidden,), eps=1e-6) * (1 + weight)

    def head_loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x @ weight.t(), targets, reduction="sum", ignore_index=-100)

    return [
        Case("RMSNorm (Llama)", lambda: [random(1, 3, hidden), random(hidden)],
             lambda x, w: ops.LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", False, None),
             lambda x, w: F.rms_norm(x, (hidden,), w, 1e-6), hidden),
        Case("RMSNorm (Gemma)", lambda: [random(1, 3, hidden), random(hidden)],
             lambda x, w: ops.LigerRMSNormFunction.apply(x, w, 1e-6, 1.0, "gemma", False, None),
             gemma_norm, hidden),
        Case("LayerNorm", lambda: [random(3, hidden), random(hidden), random(hidden)],
             lambda x, w, b: ops.LigerLayerNormFunction.apply(x, w, b, 1e-5),
             lambda x, w, b: F.layer_norm(x, (hidden,), w, b, 1e-5), hidden),
        Case("rotary embeddings", rotary_inputs,
             lambda q, k, cos, sin: torch.cat(
                 # It writes the result in place of its inputs.
                 ops.LigerRopeFunction.apply(q.clone(), k.clone(), cos, sin), dim=1),
             lambda q, k, cos, sin: torch.cat([rotate(x, cos[:, None], sin[:, None])
                                               for x in (q, k)], dim=1)),
        Case("SwiGLU", lambda: [random(3, wide), random(3, wide)],
             lambda a, b: ops.LigerSiLUMulFunction.apply(a, b), lambda a, b: F.silu(a) * b),
        Case("GeGLU", lambda: [random(3, wide), random(3, wide)],
             lambda a, b: ops.LigerGELUMulFunction.apply(a, b),
             lambda a, b: F.gelu(a, approximate="tanh") * b),
        Case("LM head with cross-entropy", lambda: [random(7, 32), random(sizes.vocabulary, 32)],
             lambda x, w: ops.LigerFusedLinearCrossEntropyFunction.apply(
                 x, w, targets, None, None, -100, 0.0, 0.0, "sum")[0],
             head_loss, sizes.vocabulary),
    ]  # fmt: skip


@dataclass(frozen=True)
class Distances:
    """Largest distance of results and gradients from float64, relative to the largest value: of
    Liger's kernels, and of plain PyTorch in float32. num_terms: of the longest sum."""

    ours: float
    plain: float
    num_terms: int

    @property
    def is_rounding(self) -> bool:
        """Return whether the kernels differ by no more than other orders of sums explain.

        A sum of n terms in order, as kernels sum over blocks, is rounded by about sqrt(n) u, u half
        the distance of 1 to the next number (Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019).
        PyTorch's own distance alone is no limit: it sums a vocabulary in order or in parts,
        depending on the number of threads, with distances that differ by a factor of eight.
        """
        rounding_of_sum = torch.finfo(torch.float32).eps / 2 * math.sqrt(self.num_terms)
        return self.ours <= max(
            TOLERANCE, MOST_TIMES_ROUNDING * self.plain, MOST_TIMES_ROUNDING * rounding_of_sum
        )


def distances(case: Case) -> Distances:
    """Compute a case by its kernels and by plain PyTorch, forward and backward."""
    torch.manual_seed(0)
    inputs = case.inputs()
    weights: torch.Tensor | None = None
    tensors_of_kinds = []
    for function, dtype in (
        (case.plain, torch.float64),
        (case.ours, torch.float32),
        (case.plain, torch.float32),
    ):
        # Copies: some kernels write gradients in place of inputs.
        own = [x.detach().to(dtype, copy=True).requires_grad_(x.requires_grad) for x in inputs]
        result = function(*own)
        weights = torch.randn_like(result) if weights is None else weights
        (result * weights.to(dtype)).sum().backward()
        tensors_of_kinds.append([result.detach(), *(x.grad for x in own if x.grad is not None)])
    exact, *others = tensors_of_kinds
    ours, plain = (
        max(
            float((a.double() - b).abs().max() / b.abs().max())
            for a, b in zip(one, exact, strict=True)
        )
        for one in others
    )
    return Distances(ours, plain, case.num_terms)


def interpret() -> None:
    """Print the difference of every case and the launches of its kernels as JSON. For a process
    with TRITON_INTERPRET=1."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    language: Any = importlib.import_module("triton.language")
    importlib.import_module("liger_kernel.ops")
    launches: list[dict[str, Any]] = []
    run = interpreter.GridExecutor.__call__
    convert = interpreter._implicit_cvt

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = dict(zip(self.arg_names, args, strict=False))
        launches.append(_launch(self, bound | kwargs))
        return run(self, *args, **kwargs)

    def converted(value: Any) -> Any:
        if type(value) is float:  # which the interpreter of Triton 3.9 leaves a Python number
            numbers = importlib.import_module("numpy").array([value], dtype="float32")
            handle = interpreter.TensorHandle(numbers, language.float32)
            return language.tensor(handle, language.float32)
        return convert(value)

    # Functions of NVIDIA's device library have no body here.
    functions = {
        "rsqrt": lambda x: language.rsqrt(x),
        "tanh": lambda x: 2 * language.sigmoid(2 * x) - 1,
    }
    for name, module in list(sys.modules.items()):
        if name.startswith("liger_kernel.ops."):
            vars(module).update({k: v for k, v in functions.items() if k in vars(module)})
    interpreter.GridExecutor.__call__ = recorded
    interpreter._implicit_cvt = converted
    results = []
    for small, large in zip(cases(SMALL), cases(LARGE), strict=True):
        of_small = distances(small)
        launches.clear()
        of_both = [asdict(one) for one in (of_small, distances(large))]
        results.append({"case": small.name, "distances": of_both, "launches": [*launches]})
    json.dump(results, sys.stdout, default=lambda dtype: {"dtype": str(dtype)})


def _launch(executor: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kernel, the types of its arguments and its constants of one launch."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    for name in executor.arg_names:
        value = values.get(name)
        if name in executor.constexprs or value is None:
            signature[name] = "constexpr"
            constants[name] = getattr(value, "value", value)
        elif isinstance(value, torch.Tensor):
            signature[name] = _POINTERS[str(value.dtype)]
        else:
            kinds = {bool: "i1", int: "i32", float: "fp32"}
            signature[name] = kinds[type(value)]
    options = {name: values[name] for name in _OPTIONS if name in values}
    kernel = {"module": executor.fn.__module__, "name": executor.fn.__name__}
    return kernel | {"signature": signature, "constants": constants, "options": options}


@dataclass(frozen=True)
class Compiled:
    """Resources of a compiled kernel: registers of a thread, bytes that it spills, bytes of shared
    memory of a block."""

    registers: int
    spilled_bytes: int
    shared_bytes: int


def compile_launch(launch: Mapping[str, Any], dtype: str, capability: int) -> Compiled:
    """Compile the kernel of a launch with its float32 pointers as `dtype` ("fp32", "bf16")."""
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # else 3.9 warns of another default
    triton: Any = importlib.import_module("triton")
    compiler: Any = importlib.import_module("triton.compiler")
    targets: Any = importlib.import_module("triton.backends.compiler")
    function = getattr(importlib.import_module(launch["module"]), launch["name"])
    signature = {
        name: f"*{dtype}" if kind == "*fp32" else kind for name, kind in launch["signature"].items()
    }
    language: Any = importlib.import_module("triton.language")
    constants = {
        name: language.dtype(dtype) if isinstance(value, dict) else value  # of the tensors
        for name, value in launch["constants"].items()
    }
    source = compiler.ASTSource(function, signature, constants)
    target = targets.GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=launch["options"])
    return resources_of(compiled.asm["ptx"], capability, int(compiled.metadata.shared))


def resources_of(ptx: str, capability: int, shared_bytes: int) -> Compiled:
    """Return what ptxas makes of `ptx`."""
    backend: Any = importlib.import_module("triton.backends.nvidia.compiler")
    ptxas = backend.get_ptxas(capability).path
    architecture = re.findall(r"\.target (sm_\w+)", ptx)[0]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        words = [ptxas, "-v", f"--gpu-name={architecture}", str(path), "-o", os.devnull]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stderr
    [registers] = re.findall(r"Used (\d+) registers", said)
    spilled = re.findall(r"(\d+) bytes spill stores", said)
    return Compiled(int(registers), sum(map(int, spilled)), shared_bytes)


def _table(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the rows of a Markdown table, one for each kernel and dtype."""
    names = " | ".join(f"sm_{capability}" for capability in CAPABILITIES)
    rows = [f"| kernel | dtype | {names} |", "|---|---|" + "---|" * len(CAPABILITIES)]
    seen: set[str] = set()
    for result in results:
        for launch in result["launches"]:
            key = json.dumps(launch, sort_keys=True)
            if key in seen:
                continue
            seen.add(key)
            for dtype in ("fp32", "bf16"):
                cells = [
                    f"{one.registers}, {one.spilled_bytes}, {one.shared_bytes}"
                    for one in (compile_launch(launch, dtype, c) for c in CAPABILITIES)
                ]
                rows.append(f"| `{launch['name']}` | {dtype} | " + " | ".join(cells) + " |")
    return list(dict.fromkeys(rows))


def _flex_table() -> list[str]:
    """Return the rows of a Markdown table of flex attention's kernels, compiled in a process for
    each capability."""
    by_kernel: dict[str, list[str]] = {}
    for capability in CAPABILITIES:
        words = [sys.executable, "-m", "benchmarks.flex_proof", str(capability)]
        child = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
        for row in json.loads(child.stdout.splitlines()[-1]):
            name = f"{row['way']}, head size {row['head_size']}"
            numbers = f"{row['registers']}, {row['spilled_bytes']}, {row['shared_bytes']}"
            by_kernel.setdefault(name, []).append(numbers)
    names = " | ".join(f"sm_{capability}" for capability in CAPABILITIES)
    head = [f"| kernel | {names} |", "|---|" + "---|" * len(CAPABILITIES)]
    return head + [f"| {name} | {' | '.join(cells)} |" for name, cells in by_kernel.items()]


def main() -> None:
    """Print the tables; exit with 1 where a kernel differs from PyTorch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--interpret", action="store_true", help=argparse.SUPPRESS)
    if parser.parse_args().interpret:
        interpret()
        return
    for name in ("triton", "liger_kernel"):
        if importlib.util.find_spec(name) is None:
            sys.exit(f"{name} is not installed -> make kernel-proof")
    words = [sys.executable, "-m", "benchmarks.kernel_proof", "--interpret"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    child = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    results = json.loads(child.stdout)
    print("| operation | kernels | small: ours | plain | large: ours | plain |")
    print("|---|---|---|---|---|---|")
    wrong = []
    for result in results:
        kernels = ", ".join(f"`{n}`" for n in dict.fromkeys(x["name"] for x in result["launches"]))
        both = [Distances(**one) for one in result["distances"]]
        distances = " | ".join(f"{one.ours:.1e} | {one.plain:.1e}" for one in both)
        print(f"| {result['case']} | {kernels} | {distances} |")
        wrong += [] if all(one.is_rounding for one in both) else [result["case"]]
    print("\nRegisters of a thread, spilled bytes, bytes of shared memory of a block:\n")
    print("\n".join(_table(results)))
    print("\nflex attention, packed documents, grouped heads, bfloat16:\n")
    print("\n".join(_flex_table()))
    if wrong:
        sys.exit(f"differ from PyTorch by more than rounding: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
