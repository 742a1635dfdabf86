"""Process-wide settings of a run (NCCL, allocator, threads), applied on entry, undone on exit.

A user's own setting always wins: an environment variable or a field of the run YAML.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

import torch
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

from bigtrain.engine.startup.device import device_kind
from bigtrain.errors import one_line
from bigtrain.models.torch_patches import set_allocator
from bigtrain.settings.resolve import ResolvedRun
from bigtrain.system.machine import (
    CpuShare,
    allocator_settings,
    cpu_share,
    local_world_size,
    nccl_defaults,
    this_machine,
)
from bigtrain.system.world import World, describe_foreign


@contextmanager
def runtime_settings(
    run: ResolvedRun, world: World, environment: MutableMapping[str, str] = os.environ
) -> Iterator[list[str]]:
    """Apply the settings of NCCL, the allocator, float32 products, threads and cores for `run`.
    Yields human-readable lines on the settings. Call it before the process group is opened and
    before the first GPU allocation. Not collective. The allocator's settings are not undone."""
    lines = describe_foreign(world, environment)
    added: dict[str, str] = {}
    if device_kind() == "cuda":
        added = nccl_defaults(environment, Path(run.config.output.directory))
        environment.update(added)
        if added:
            assignments = ", ".join(f"{name}={value}" for name, value in added.items())
            lines.append(f"set for NCCL: {assignments}")
        # The first settings of the allocator whose keys this version of torch has.
        for settings in allocator_settings(environment):
            with suppress(RuntimeError, ValueError):
                set_allocator(settings)
                lines.append(f"CUDA allocator: {settings}")
                break
    precision_before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if run.config.precision.tf32 else "highest")
    if device_kind() == "cuda":
        lines.append(
            "float32 matrix products "
            + ("in TF32 (precision.tf32)" if run.config.precision.tf32 else "in full (no TF32)")
        )
    share = _cpu_share(run, world, environment)
    threads_before = torch.get_num_threads()
    # Bind this rank, and the processes that it starts from here on.
    cores_before = None
    if share.cores is not None and hasattr(os, "sched_setaffinity"):
        cores_before = os.sched_getaffinity(0)
        with suppress(OSError):  # a container may forbid it: the run is slower, but correct
            os.sched_setaffinity(0, share.cores)
    if share.num_threads is not None:
        torch.set_num_threads(share.num_threads)
    if share.cores is not None or (share.num_threads is not None and device_kind() != "cpu"):
        cores = f", bound to {len(share.cores)} cores" if share.cores is not None else ""
        host_text = f" of {local_world_size(environment)} processes here" if cores else ""
        lines.append(f"each{host_text} has {torch.get_num_threads()} CPU threads{cores}")
    kernels: AbstractContextManager[list[str]] = nullcontext([])
    if device_kind() == "cuda":
        kernels = fast_attention(run.config.model.attention)
    try:
        with kernels as attention_lines:
            yield [*lines, *attention_lines]
    finally:
        torch.set_num_threads(threads_before)
        if cores_before is not None:
            with suppress(OSError):
                os.sched_setaffinity(0, cores_before)
        torch.set_float32_matmul_precision(precision_before)
        for name in added:
            environment.pop(name, None)


@contextmanager
def fast_attention(attention: str) -> Iterator[list[str]]:
    """Let sdpa compute by FlashAttention 3 inside, with its package on a Hopper GPU
    (`activate_flash_attention_impl`, torch 2.11), instead of cuDNN's kernels, which are slower on
    Hopper (docs/benchmarks.md). Yields a line on the kernels, with the reason against
    FlashAttention 3."""
    if attention not in ("auto", "sdpa"):
        yield []
        return
    reason = ""
    major, _ = torch.cuda.get_device_capability()
    if major != 9:
        reason = "it needs a Hopper GPU"
    elif importlib.util.find_spec("flash_attn_interface") is None:
        reason = "flash_attn_interface is not installed"
    if reason:
        yield [f"attention: torch's own kernels (not FlashAttention 3: {reason})"]
        return
    try:
        activate_flash_attention_impl("FA3")
    except (ImportError, ValueError, RuntimeError) as error:
        yield [f"attention: torch's own kernels (not FlashAttention 3: {one_line(error, None)})"]
        return
    has_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield ["attention: FlashAttention 3, by torch's sdpa"]
    finally:
        torch.backends.cuda.enable_cudnn_sdp(has_cudnn)
        restore_flash_attention_impl(_raise_warn=False)


def _cpu_share(run: ResolvedRun, world: World, environment: MutableMapping[str, str]) -> CpuShare:
    """Return the CPU threads and cores of this rank."""
    engine = run.config.engine
    if device_kind() == "cpu":
        # CPU ranks are for trials: torch's own number of threads, divided, and no binding.
        num_threads = max(1, torch.get_num_threads() // local_world_size(environment))
        is_set = "OMP_NUM_THREADS" in environment
        return CpuShare(engine.cpu_threads or (None if is_set else num_threads))
    # The cores of the full host: given an environment, `this_machine` divides by LOCAL_WORLD_SIZE.
    num_cores = this_machine({}).num_cores
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(num_cores)
    return cpu_share(
        environment,
        world.local_rank,
        allowed,
        num_cores,
        computes_on_cpu=run.engine.offload_optimizer is not None,
        threads=engine.cpu_threads,
        bind=engine.bind_cores,
    )
