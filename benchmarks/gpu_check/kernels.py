"""Parts on kernels: attention, losses and fused layers, float8, compilation; each compared with
plain PyTorch."""

from __future__ import annotations

import importlib.util
from functools import partial

from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_check.parity import Surroundings, compare_cases
from benchmarks.gpu_check.results import Part, Setup
from benchmarks.gpu_check.stand_ins import flex_on_cpu, quick_compilation
from benchmarks.gpu_check.training import Case, size_of


def attention(setup: Setup, part: Part) -> None:
    """Check sdpa by each of its kernels, flash attention and flex, documents mixed and kept
    apart."""
    backends = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "math": SDPBackend.MATH,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
    }
    trials = {}
    for name, backend in backends.items():
        if name in ("efficient", "cudnn") and not setup.on_gpu:
            part.note(f"sdpa-{name}", "needs CUDA")
            continue
        # Only in the steps: models are verified on the CPU before, which has other kernels.
        forced = partial(sdpa_kernel, backend)
        trials[f"sdpa-{name}"] = "sdpa", Surroundings(steps=forced, unfit="No available kernel")
    flex = partial(flex_on_cpu, setup.device)
    trials["flex"] = "flex_attention", Surroundings(build=flex)
    if importlib.util.find_spec("flash_attn") is None:
        part.note("flash_attention_2", "flash-attn is not installed")
    elif setup.on_gpu:
        trials["flash_attention_2"] = "flash_attention_2", Surroundings()
    cases, surroundings = [], {}
    for name, (implementation, around) in trials.items():
        for isolate in (False, True):
            case = Case(
                f"{name}{'-documents' if isolate else ''}",
                "zero1",
                dtype="bfloat16",
                isolate=isolate,
                model={"attention": implementation},
            )
            cases.append(case)
            surroundings[case.name] = around
    compare_cases(setup, part, cases, surroundings)


def losses(setup: Setup, part: Part) -> None:
    """Check the loss in chunks and Liger's, and Liger's fused layers."""
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
    compare_cases(setup, part, [*cases, *liger])


def float8(setup: Setup, part: Part) -> None:
    """Check products in float8, by tensor and by row, against torchao's own layers."""
    if importlib.util.find_spec("torchao") is None:
        part.skip("torchao is not installed")
        return
    cases = [
        Case(f"{recipe}-{engine}", engine, dtype="bfloat16", float8=recipe)
        for recipe, engine in (("tensorwise", "zero1"), ("rowwise", "zero1"), ("rowwise", "zero3"))
    ]
    compare_cases(setup, part, cases)


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
    around = Surroundings(build=partial(quick_compilation, setup.tiny))
    compare_cases(setup, part, cases, {case.name: around for case in cases})
