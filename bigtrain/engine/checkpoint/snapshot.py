"""Saving and restoring of a training engine. All functions are collective unless stated."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bigtrain.engine.checkpoint.fragments import (
    MASTER,
    Fragment,
    as_saved,
    ensure_optimizer_states,
    optimizer_step_count,
    owned_fragments,
    set_optimizer_step_count,
    small_state_fragments,
    to_fill,
)
from bigtrain.engine.checkpoint.io import (
    Staging,
    TensorSnapshot,
    read_tensors,
    stored_dtypes,
    writers,
)
from bigtrain.engine.checkpoint.layout import CheckpointLayout
from bigtrain.engine.checkpoint.tensor_files import Listing
from bigtrain.engine.deepspeed_patches.optimizers import (
    inner_optimizer,
    restore_scaler,
    scaler_state,
)
from bigtrain.engine.optimizers.update_rule import (
    AVERAGE,
    RuleOptimizer,
    state_bytes_by_name,
)
from bigtrain.engine.startup.long_work import on_all_ranks
from bigtrain.engine.train_engine import TrainEngine
from bigtrain.errors import CheckpointError
from bigtrain.models.layers.adapter_names import base_name, has_adapters
from bigtrain.models.layers.parameters import parameter_of
from bigtrain.models.parallel.sharding import full_shape
from bigtrain.models.weights.import_hf import Weights

_MASTER_BYTES, _ADAM_BYTES = 4, 8


@dataclass(frozen=True)
class EngineSnapshot:
    """State of an engine at a step. tensors: for the tensor files; scalars: for ``state.json``."""

    tensors: TensorSnapshot
    scalars: dict[str, Any]


def snapshot_engine(engine: TrainEngine, staging: Staging | None = None) -> EngineSnapshot:
    """Return masters, optimizer states and buffers, or copies in `staging`. Collective. A run with
    adapters saves only what is trained, not the frozen base weights."""
    ensure_optimizer_states(engine.engine)
    fragments = as_saved(engine.exact, _all_fragments(engine), engine.mesh)
    tensors = TensorSnapshot(fragments, _buffers(engine), engine.mesh, staging)
    optimizer = inner_optimizer(engine.engine)
    scalars = {
        "optimizer_steps": optimizer_step_count(engine.engine),
        "loss_scaler": scaler_state(engine.engine.optimizer),
        AVERAGE: optimizer.average_decay if isinstance(optimizer, RuleOptimizer) else None,
    }
    return EngineSnapshot(tensors, scalars)


def refuse_not_finite(engine: TrainEngine, group: dist.ProcessGroup | None = None) -> None:
    """Raise CheckpointError on every rank if a trained master, or a state that an outer step keeps,
    contains NaN or an infinity on any rank: these weights can never be trained again. Collective
    over `group`, a group of the world. Reads each tensor once and copies none."""

    def check() -> None:
        text = not_finite(engine)
        if text is not None:
            raise CheckpointError(text)

    on_all_ranks(check, group)


def not_finite(engine: TrainEngine) -> str | None:
    """Return why this rank's part of the trained weights cannot be trained again
    (`refuse_not_finite`); None if it can. Not collective."""
    # Parameter, state and values.
    tensors: list[tuple[str, str, torch.Tensor]] = []
    for fragment in owned_fragments(engine.engine, engine.module):
        if _is_trained(engine, fragment.name):
            states = {MASTER: fragment.tensors[MASTER]}
            states |= engine.added_states.get(fragment.name, {})
            tensors += [(fragment.name, state, tensor) for state, tensor in states.items()]
    indexes_by_device: dict[torch.device, list[int]] = {}
    for index, (_, _, tensor) in enumerate(tensors):
        if tensor.numel():
            indexes_by_device.setdefault(tensor.device, []).append(index)
    for indexes in indexes_by_device.values():  # the host waits once for each device
        # A tensor is finite if its least and largest values are.
        extremes = [torch.stack(torch.aminmax(tensors[index][2])).double() for index in indexes]
        is_finite = torch.stack(extremes).isfinite().all(1)
        if not is_finite.all():
            first_bad = int(is_finite.logical_not().nonzero()[0])
            name, state, _ = tensors[indexes[first_bad]]
            return (
                f"the weights are not finite: {state} of {name} holds NaN or an infinity, from "
                "which no training can continue"
            )
    return None


def checkpoint_bytes(engine: TrainEngine) -> int:
    """Return the bytes of a checkpoint's tensors for this rank's pipeline stage, summed over the
    ranks: trained parameters in float32; buffers and frozen parameters in the dtype in which they
    are kept. A run with adapters saves no frozen parameters."""
    skips_frozen = has_adapters(engine.module)
    state_bytes = state_bytes_by_name(inner_optimizer(engine.engine))
    exact_bytes = {
        name: value.element_size()
        for name, value in engine.exact.frozen.items()
        if value is not None
    }
    # Every parameter has as many added states, also a parameter of which this rank has no part.
    num_added = max(map(len, engine.added_states.values()), default=0)
    num_bytes = 0.0
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            element_bytes = _MASTER_BYTES * (1 + num_added) + state_bytes.get(name, _ADAM_BYTES)
        elif skips_frozen:
            continue
        else:
            element_bytes = exact_bytes.get(name, parameter.element_size())
        num_bytes += math.prod(full_shape(parameter)) * element_bytes
    buffers = _buffers(engine).values()
    return int(num_bytes) + sum(buffer.numel() * buffer.itemsize for buffer in buffers)


def save_engine(engine: TrainEngine, directory: Path) -> dict[str, Any]:
    """Write masters, optimizer states and buffers below `directory`; return the scalars
    (`EngineSnapshot`). Collective over all ranks, which must share `directory`."""
    snapshot = snapshot_engine(engine)
    snapshot.tensors.write(directory)
    return snapshot.scalars


def restore_engine(
    engine: TrainEngine,
    directory: Path,
    scalars: dict[str, Any],
    listing: Listing | None = None,
) -> None:
    """Fill the engine from `directory`, written at any topology, and from the `scalars` of
    `save_engine`. If the checkpoint has no averages of weights, they begin with the weights.
    Collective. Raises CheckpointError for tensors missing or of other shapes,
    CorruptCheckpointError for unreadable files; another checkpoint may then be restored."""
    ensure_optimizer_states(engine.engine)
    stored = _all_fragments(engine)
    has_averages = scalars.get(AVERAGE) is not None
    if not has_averages:
        for fragment in stored:
            fragment.tensors.pop(AVERAGE, None)
    with _exact_frozen(engine, stored, directory, listing) as fragments:
        read_tensors(directory, fragments, _buffers(engine), listing)
    optimizer = inner_optimizer(engine.engine)
    if not has_averages and isinstance(optimizer, RuleOptimizer):
        optimizer.restart_averages()
    set_optimizer_step_count(engine.engine, int(scalars["optimizer_steps"]))
    restore_scaler(engine.engine.optimizer, scalars.get("loss_scaler", {}))
    engine.refresh_parameters()


def writers_of_own_parts(engine: TrainEngine, layout: CheckpointLayout) -> set[int]:
    """Return the ranks that wrote the parts, in a checkpoint with the `layout`, which this rank
    reads to restore the engine; perhaps a few more. Not collective."""
    ensure_optimizer_states(engine.engine)
    return writers(_all_fragments(engine), _buffers(engine), layout)


def restore_weights(engine: TrainEngine, directory: Path, listing: Listing | None = None) -> None:
    """Fill only masters and buffers from `directory`; the optimizer keeps its new states.
    Collective. Raises like `restore_engine`."""
    masters = [
        replace(fragment, tensors={MASTER: fragment.tensors[MASTER]})
        for fragment in owned_fragments(engine.engine, engine.module)
    ]
    with _exact_frozen(engine, masters, directory, listing) as fragments:
        read_tensors(directory, fragments, _buffers(engine), listing)
    engine.refresh_parameters()


def read_weights(engine: TrainEngine, weights: Weights) -> None:
    """Fill masters and buffers exactly from the files of a Hugging Face model. Collective.

    Each rank reads the parts that it owns; weights kept in 4 bits are read and packed by every
    rank. Adapters keep their initial values, except parameters that are a function of the base
    weights (`with_magnitudes`). Raises ModelError on every rank if one cannot read.
    """
    is_saved = not has_adapters(engine.module)
    if not is_saved:
        from bigtrain.models.weights.quantized import read_quantized, with_magnitudes

        weights = with_magnitudes(weights, engine.module)

    def read() -> None:
        if not is_saved:
            read_quantized(engine.module, weights, engine.device)
        for fragment in owned_fragments(engine.engine, engine.module):
            name = base_name(fragment.name)
            if name not in weights.tensors and has_adapters(engine.module):
                continue  # an adapter keeps its initial values
            target = fragment
            if not _is_trained(engine, fragment.name):
                dtype = weights.tensors[name].dtype
                target = to_fill(engine.exact, fragment, dtype, engine.mesh, is_saved=is_saved)
            for box, view in target.parts(MASTER):
                weights.fill(name, box.offsets, view)
            if target is not fragment:
                fragment.tensors[MASTER].copy_(target.tensors[MASTER])
        for name, buffer in _buffers(engine).items():
            if (name := base_name(name)) in weights.tensors:
                weights.fill(name, (0,) * buffer.ndim, buffer, is_buffer=True)

    on_all_ranks(read)
    engine.refresh_parameters()


def _all_fragments(engine: TrainEngine) -> list[Fragment]:
    """Return the fragments of this rank that a checkpoint contains."""
    owned = [
        replace(fragment, tensors=fragment.tensors | engine.added_states.get(fragment.name, {}))
        for fragment in owned_fragments(engine.engine, engine.module)
    ]
    if has_adapters(engine.module):
        # Frozen weights are read from the files of the base model again.
        owned = [fragment for fragment in owned if _is_trained(engine, fragment.name)]
    tensor_rank = engine.mesh.coordinates.tensor_rank
    return owned + small_state_fragments(engine.engine, engine.module, tensor_rank)


@contextmanager
def _exact_frozen(
    engine: TrainEngine,
    fragments: Sequence[Fragment],
    directory: Path,
    listing: Listing | None,
) -> Iterator[list[Fragment]]:
    """Yield `fragments` to fill from `directory`, with frozen parameters in the dtype of the files;
    on exit copy the filled values to DeepSpeed's tensors."""
    frozen = [fragment for fragment in fragments if not _is_trained(engine, fragment.name)]
    # Collective, so it is also called on ranks without a frozen parameter.
    dtypes = stored_dtypes(directory, frozen, listing)
    originals: dict[str, Fragment] = {}
    targets: dict[str, Fragment] = {}
    for fragment in frozen:
        target = to_fill(engine.exact, fragment, dtypes[fragment.name], engine.mesh)
        if target is not fragment:
            originals[fragment.name], targets[fragment.name] = fragment, target
    yield [targets.get(fragment.name, fragment) for fragment in fragments]
    for name, target in targets.items():
        originals[name].tensors[MASTER].copy_(target.tensors[MASTER])


def _is_trained(engine: TrainEngine, name: str) -> bool:
    return parameter_of(engine.module, name).requires_grad


def _buffers(engine: TrainEngine) -> dict[str, torch.Tensor]:
    """Return the buffers that belong to a state dict, by name; equal on every rank that has
    them."""
    state_keys = engine.module.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in engine.module.named_buffers() if name in state_keys}
