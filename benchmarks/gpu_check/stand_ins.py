"""What stands on a CPU for what only CUDA has, so that the same lines run in the tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
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
    """At tiny size, let `torch.compile` trace and differentiate, and not call a compiler."""
    if not tiny:
        return nullcontext()
    return mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager"))


@contextmanager
def flex_on_cpu(device: str) -> Iterator[None]:
    """flex attention, not compiled: what torch refuses on a CPU is only its kernels' backward."""
    if device == "cuda":
        yield
        return
    import torch.nn.attention.flex_attention as flex

    with (
        mock.patch.object(flex, "_validate_device", return_value=None),
        torch.compiler.set_stance("force_eager"),
    ):
        yield
