"""CPU replacements of CUDA-only functions, so that the same lines run in the tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from deepspeed.accelerator import get_accelerator


@contextmanager
def float16_on_cpu(device: str) -> Iterator[None]:
    """Let DeepSpeed take float16 on a CPU: torch computes it there, slowly."""
    if device == "cuda":
        yield
        return
    accelerator = get_accelerator()
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    with (
        mock.patch.object(accelerator, "is_fp16_supported", return_value=True),
        mock.patch.object(accelerator, "supported_dtypes", return_value=dtypes),
    ):
        yield


def quick_compilation(tiny: bool) -> Any:
    """Make `torch.compile` at tiny size only trace and differentiate, without a compiler."""
    if not tiny:
        return nullcontext()
    return mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager"))


@contextmanager
def flex_on_cpu(device: str) -> Iterator[None]:
    """Run flex attention without compiling: torch refuses only its kernels' backward on a CPU."""
    if device == "cuda":
        yield
        return
    import torch.nn.attention.flex_attention as flex

    with (
        mock.patch.object(flex, "_validate_device", return_value=None),
        torch.compiler.set_stance("force_eager"),
    ):
        yield


@contextmanager
def out_of_memory_on_cpu() -> Iterator[None]:
    """Make the second step of a run fail like CUDA's allocator, with invented numbers."""
    from bigtrain.engine.train_engine import TrainEngine
    from bigtrain.run.diagnostics import out_of_memory

    whole, calls = TrainEngine.train_step, [0]

    def step(engine: TrainEngine, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return whole(engine, *args, **kwargs)

    device = mock.Mock(total_memory=1 << 29)
    with (
        mock.patch.object(TrainEngine, "train_step", step),
        mock.patch.object(torch.cuda, "memory_allocated", return_value=1 << 29),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=device),
        mock.patch.object(
            out_of_memory, "dump_memory_snapshot", side_effect=lambda path: Path(path).touch()
        ),
    ):
        yield
