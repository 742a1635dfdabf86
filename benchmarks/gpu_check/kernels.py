"""Parts on kernels: attention, losses and fused layers, compilation; each against plain PyTorch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_check.parity import compare_case
from benchmarks.gpu_check.results import Part, Setup
from benchmarks.gpu_check.stand_ins import flex_on_cpu, quick_compilation
from benchmarks.gpu_check.training import Case, alone, run_of, size_of

Around = Callable[[], AbstractContextManager[Any]]


def attention(setup: Setup, part: Part) -> None:
    """sdpa by each of its kernels, flash attention and flex, documents mixed and kept apart."""
    trials: list[tuple[str, str, Around]] = []
    backends = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "math": SDPBackend.MATH,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
    }
    for name, backend in backends.items():
        if name in ("efficient", "cudnn") and not setup.on_gpu:
            part.note(f"sdpa-{name}", "needs CUDA")
            continue
        trials.append((f"sdpa-{name}", "sdpa", partial(sdpa_kernel, backend)))
    trials.append(("flex", "flex_attention", partial(flex_on_cpu, setup.device)))
    if importlib.util.find_spec("flash_attn") is None:
        part.note("flash_attention_2", "flash-attn is not installed")
    elif setup.on_gpu:
        trials.append(("flash_attention_2", "flash_attention_2", nullcontext))
    with alone(setup, run_of(setup, Case("first"))) as device:
        for name, implementation, around in trials:
            for isolate in (False, True):
                case = Case(
                    f"{name}{'-documents' if isolate else ''}",
                    "zero1",
                    dtype="bfloat16",
                    isolate=isolate,
                    model={"attention": implementation},
                )
                compare_case(setup, part, case, device, around)


def losses(setup: Setup, part: Part) -> None:
    """The loss in chunks and Liger's, and Liger's fused layers."""
    # Several chunks, the last of them smaller.
    size = size_of(setup)
    chunk = size.micro_batch_size * size.tokens * 2 // 5 + 1
    chunked = {"loss": "chunked", "loss_chunk_tokens": chunk}
    cases = [
        Case("chunked-fp32", "zero0", model=chunked),
        Case("chunked-bf16", "zero1", dtype="bfloat16", model=chunked),
        Case("chunked-zero3", "zero3", dtype="bfloat16", model=chunked),
    ]
    liger = [
        Case("liger-fp32", "zero0", model={"loss": "liger"}),
        Case("liger-bf16", "zero1", dtype="bfloat16", model={"loss": "liger"}),
        Case("liger-kernels", "zero1", model={"kernels": "liger"}),  # last: it changes transformers
    ]
    missing = importlib.util.find_spec("liger_kernel") is None
    if not setup.on_gpu or missing:
        why = "needs CUDA" if not setup.on_gpu else "liger-kernel is not installed"
        for case in liger:
            part.note(case.name, why)
        liger = []
    with alone(setup, run_of(setup, cases[0])) as device:
        for case in [*cases, *liger]:
            compare_case(setup, part, case, device)


def compilation(setup: Setup, part: Part) -> None:
    """Compiled layers, with and without recomputation."""
    on = {"compile": "on"}
    cases = [
        Case("compiled-fp32", "zero0", model=on),
        Case("compiled-bf16", "zero1", dtype="bfloat16", model=on),
        Case(
            "compiled-recomputed",
            "zero1",
            dtype="bfloat16",
            model={**on, "gradient_checkpointing": "full"},
        ),
    ]
    around = partial(quick_compilation, setup.tiny)
    with alone(setup, run_of(setup, cases[0])) as device:
        for case in cases:
            compare_case(setup, part, case, device, around)
