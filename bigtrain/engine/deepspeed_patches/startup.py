"""Process-wide state of DeepSpeed: compiled operators and process groups."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from deepspeed import comm
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.utils import groups
from torch.distributed import distributed_c10d

_ARCHITECTURES = "TORCH_CUDA_ARCH_LIST"


def set_mpu(mpu: Any) -> None:
    """Set the model-parallel unit of DeepSpeed's group functions; None: no unit. An engine sets its
    unit there (0.19.8, utils/groups.py:50, runtime/engine.py:2122), but an engine without a unit
    keeps the unit of an earlier engine."""
    groups.mpu = mpu


@contextmanager
def restore_process_state() -> Iterator[None]:
    """Restore on exit the process state that DeepSpeed changes when it builds an engine:
    `torch.nn.functional.linear`, which ZeRO 3 replaces (0.19.8,
    runtime/zero/partition_parameters.py:417), the logger's level, and references to an engine's
    groups and `mpu`, which outlive `destroy_process_group` (utils/groups.py:89)."""
    logger = logging.getLogger("DeepSpeed")
    linear, level = torch.nn.functional.linear, logger.level
    try:
        yield
    finally:
        torch.nn.functional.linear = linear
        logger.setLevel(level)
        if not torch.distributed.is_initialized():
            groups._release_process_group_references()


@contextmanager
def destroyed_groups() -> Iterator[None]:
    """Destroy on exit the process groups that were created inside, DeepSpeed's among them.

    For processes that build many engines in one world: a gloo group keeps two threads and its
    sockets while anything refers to it, and 100 groups of two ranks take 7% of a core when idle.
    Collective over all ranks, unless the block raises: then other ranks may never arrive.
    """
    existing = set(distributed_c10d._world.pg_map)
    yield
    torch.distributed.barrier()  # a peer may still read from a group that this rank has left
    for group in [group for group in distributed_c10d._world.pg_map if group not in existing]:
        comm.destroy_process_group(group)
    gc.collect()


@contextmanager
def operators_loaded_by(load: Callable[..., ModuleType]) -> Iterator[None]:
    """Load operators that DeepSpeed compiles inside by `load`, whose first argument is torch's
    loader `torch.utils.cpp_extension.load` (0.19.8, ops/op_builder/builder.py:568, `jit_load`).

    Communication in shared memory is not loaded: on CPUs DeepSpeed would load it at every start for
    inference (comm/torch.py, `build_shm_op`), and fill 69 MB of /dev/shm per rank, which nobody
    removes (csrc/cpu/comm/shm.cpp).
    """
    jit_load = OpBuilder.jit_load
    # Imported by name: the attribute `deepspeed.comm.torch` is the package torch.
    backend = importlib.import_module("deepspeed.comm.torch")

    def load_jit(builder: OpBuilder, verbose: bool = True) -> ModuleType:
        from torch.utils import cpp_extension

        with (
            replaced(cpp_extension, "load", partial(load, cpp_extension.load)),
            _plain_architectures(),
        ):
            module: ModuleType = jit_load(builder, verbose)
            return module

    with (
        replaced(OpBuilder, "jit_load", load_jit),
        replaced(backend, "build_shm_op", lambda: None),
    ):
        yield


@contextmanager
def _plain_architectures() -> Iterator[None]:
    """Remove the letters of architectures (9.0a) from TORCH_CUDA_ARCH_LIST inside: DeepSpeed cannot
    read them (0.19.8, ops/op_builder/builder.py, `compute_capability_args`), and its operators use
    nothing that only such architectures have."""
    before = os.environ.get(_ARCHITECTURES)
    if before is None:
        yield
        return
    os.environ[_ARCHITECTURES] = re.sub(r"(\d+\.\d+)[a-z]", r"\1", before)
    try:
        yield
    finally:
        os.environ[_ARCHITECTURES] = before


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace the attribute `name` of `owner` by `value` inside the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
