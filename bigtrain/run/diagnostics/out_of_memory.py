"""CUDA out-of-memory errors with the use of the memory, the settings to change, and a snapshot of
the allocator in the run's directory (viewer: https://docs.pytorch.org/memory_viz)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bigtrain.engine.deepspeed_patches.optimizers import kept_gradients
from bigtrain.engine.deepspeed_patches.partitions import partition_of
from bigtrain.engine.train_engine import TrainEngine
from bigtrain.errors import LaunchError
from bigtrain.models.torch_patches import dump_memory_snapshot
from bigtrain.models.weights.packed import packed_tensors
from bigtrain.run.context import RunContext
from bigtrain.run.diagnostics.profiling import DIRECTORY
from bigtrain.settings.run_config import RunConfig
from bigtrain.system.units import GIB


@dataclass(frozen=True)
class MeasuredMemory:
    """Use of a device's memory, in bytes; `unattributed`: activations and everything else."""

    parameters: int
    gradients: int
    optimizer: int
    unattributed: int
    total: int

    def describe(self) -> str:
        """Return one line, in GiB."""
        parts = {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations and other": self.unattributed,
        }
        sizes = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
        return f"of {self.total / GIB:.2f} GiB: {sizes}"


def memory_use(model: nn.Module, optimizer: Any, allocated: int, total: int) -> MeasuredMemory:
    """Return the use of the `allocated` bytes of a device with `total`, by a `model` and
    DeepSpeed's or torch's `optimizer`; each storage counts once."""
    storages: set[int] = set()
    parameters = _uncounted_bytes((p.data for p in model.parameters()), storages)
    parameters += _uncounted_bytes(packed_tensors(model), storages)
    partitions = (partition_of(p) for p in model.parameters())
    parameters += _uncounted_bytes((p for p in partitions if p is not None), storages)
    grads = (p.grad for p in model.parameters())
    gradients = _uncounted_bytes((grad for grad in grads if grad is not None), storages)
    # ZeRO keeps gradients in the optimizer until its step.
    gradients += _uncounted_bytes(_nested_tensors(kept_gradients(optimizer)), storages)
    state = _nested_tensors(getattr(optimizer, "state", {}))
    state += _nested_tensors([group["params"] for group in getattr(optimizer, "param_groups", [])])
    optimizer_bytes = _uncounted_bytes(state, storages)
    other_bytes = max(0, allocated - parameters - gradients - optimizer_bytes)
    return MeasuredMemory(parameters, gradients, optimizer_bytes, other_bytes, total)


def _nested_tensors(value: Any) -> list[torch.Tensor]:
    if torch.is_tensor(value):
        return [value]
    if not isinstance(value, (dict, list)):
        return []
    items = value.values() if isinstance(value, dict) else value
    return [tensor for item in items for tensor in _nested_tensors(item)]


def _uncounted_bytes(tensors: Any, storages: set[int]) -> int:
    """Return the bytes of the storages of `tensors` that are not among `storages`, the addresses
    counted so far, and add them there."""
    num_bytes = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device.type != "meta" and storage.data_ptr() not in storages and storage.nbytes():
            storages.add(storage.data_ptr())
            num_bytes += storage.nbytes()
    return num_bytes


def remedies(config: RunConfig, zero_stage: int, memory: MeasuredMemory) -> list[str]:
    """Return settings that reduce the largest uses of memory, the cheapest change first."""
    settings = []
    # Activations: a smaller micro-batch, recomputation, then longer work per token.
    if memory.unattributed >= memory.total / 4:
        if config.batch.micro_batch_size > 1:
            settings.append(f"batch.micro_batch_size={max(1, config.batch.micro_batch_size // 2)}")
        if config.model.loss == "plain":
            settings.append("model.loss=auto")
        if config.model.gradient_checkpointing != "full":
            settings.append("model.gradient_checkpointing=full")
        elif not config.model.activation_offload:
            settings.append("model.activation_offload=true")
        if config.model.gradient_checkpointing == "full":
            if config.model.tiled_mlp == "off":
                settings.append("model.tiled_mlp=auto")
            degrees = config.parallel.degrees
            if degrees.ring_size > 1:
                doubled_ring = f"ulysses: {degrees.ulysses_size}, ring: {2 * degrees.ring_size}"
                settings.append(f"parallel.sequence={{{doubled_ring}}}")
            else:
                settings.append(f"parallel.sequence={2 * degrees.sequence_size}")
    # Parameters, gradients and optimizer states: a higher ZeRO stage, then offloading.
    if memory.parameters + memory.gradients + memory.optimizer >= memory.total / 4:
        if zero_stage < 3:
            settings.append(f"ds_configs/zero{zero_stage + 1}.json on more ranks")
        settings.append(f"ds_configs/zero{min(3, max(2, zero_stage))}_offload.json")
    return settings or ["more devices, or a smaller model"]


def explained(
    error: torch.OutOfMemoryError, context: RunContext, engine: TrainEngine
) -> LaunchError:
    """Return CUDA's out-of-memory error with memory use and suggestions. Call it before any tensor
    of the step is freed: the traceback of `error` holds the activations."""
    device = context.device
    allocated = torch.cuda.memory_allocated(device)
    total = torch.cuda.get_device_properties(device).total_memory
    memory = memory_use(engine.module, engine.engine.optimizer, allocated, total)

    # The allocator's history shows which allocations the step made.
    directory = context.directory / DIRECTORY
    path = directory / f"out_of_memory_rank_{context.world.rank}.pickle"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        dump_memory_snapshot(str(path))
        written = f"; snapshot: {path}"
    except (OSError, RuntimeError):
        written = ""
    config, stage = context.config, context.run.engine.zero_stage
    reason = str(error).strip().splitlines()[0]
    return LaunchError(
        f"rank {context.world.rank} ran out of device memory ({reason}): "
        f"{memory.describe()}{written} -> {', or '.join(remedies(config, stage, memory))}"
    )
