"""Saving and restoring a whole training engine, in a form that does not know the topology.

Both functions are collective. What a checkpoint directory is, and when it exists, is the business
of `bigtrain.run.checkpointing.checkpoints`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bigtrain.engine.checkpoint.fragments import (
    MASTER,
    ensure_optimizer_states,
    optimizer_step_count,
    owned_fragments,
    set_optimizer_step_count,
)
from bigtrain.engine.checkpoint.io import Staging, TensorSnapshot, read_tensors
from bigtrain.engine.checkpoint.tensor_files import Listing
from bigtrain.engine.deepspeed_patches.optimizers import (
    refresh_parameters,
    restore_scaler,
    scaler_state,
)
from bigtrain.engine.train_engine import TrainEngine
from bigtrain.errors import ModelError
from bigtrain.models.parallel.sharding import full_shape
from bigtrain.models.weights.import_hf import Weights

_TRAINED_BYTES = 12


@dataclass(frozen=True)
class EngineSnapshot:
    """An engine's state at one step. tensors: to be written; scalars: what goes to JSON."""

    tensors: TensorSnapshot
    scalars: dict[str, Any]


def snapshot_engine(engine: TrainEngine, staging: Staging | None = None) -> EngineSnapshot:
    """Masters, optimizer states and buffers, or what `staging` takes of them. Collective."""
    ensure_optimizer_states(engine.engine)
    tensors = TensorSnapshot(
        owned_fragments(engine.engine, engine.module), _buffers(engine), engine.mesh, staging
    )
    scalars = {
        "optimizer_steps": optimizer_step_count(engine.engine),
        "loss_scaler": scaler_state(engine.engine.optimizer),
    }
    return EngineSnapshot(tensors, scalars)


def checkpoint_bytes(engine: TrainEngine) -> int:
    """Of the tensors that a checkpoint holds of this rank's pipeline stage, all ranks together.

    Masters and AdamW's two states in float32, frozen parameters and buffers as they are.
    """
    parameters = sum(
        math.prod(full_shape(parameter))
        * (_TRAINED_BYTES if parameter.requires_grad else parameter.element_size())
        for parameter in engine.module.parameters()
    )
    return parameters + sum(b.numel() * b.itemsize for b in _buffers(engine).values())


def save_engine(engine: TrainEngine, directory: Path) -> dict[str, Any]:
    """Write masters, optimizer states and buffers below `directory`; returns what goes to JSON.

    Collective over all ranks, which must see the same `directory`.
    """
    snapshot = snapshot_engine(engine)
    snapshot.tensors.write(directory)
    return snapshot.scalars


def restore_engine(
    engine: TrainEngine,
    directory: Path,
    scalars: dict[str, Any],
    listing: Listing | None = None,
) -> None:
    """Fill the engine from `directory`, written at any topology, and from `save_engine`'s dict.

    `listing`: of its files; None takes those that are there. Collective over all ranks. Raises
    CheckpointError for tensors missing or of other shapes, CorruptCheckpointError for files that
    cannot be read; another checkpoint may be restored then.
    """
    ensure_optimizer_states(engine.engine)
    fragments = owned_fragments(engine.engine, engine.module)
    read_tensors(directory, fragments, _buffers(engine), listing)
    set_optimizer_step_count(engine.engine, int(scalars["optimizer_steps"]))
    restore_scaler(engine.engine.optimizer, scalars.get("loss_scaler", {}))
    refresh_parameters(engine.engine)


def restore_weights(engine: TrainEngine, directory: Path, listing: Listing | None = None) -> None:
    """Fill masters and buffers alone from `directory`; the optimizer stays as new. Collective.

    Raises as `restore_engine`.
    """
    masters = [
        replace(fragment, tensors={MASTER: fragment.tensors[MASTER]})
        for fragment in owned_fragments(engine.engine, engine.module)
    ]
    read_tensors(directory, masters, _buffers(engine), listing)
    refresh_parameters(engine.engine)


def read_weights(engine: TrainEngine, weights: Weights) -> None:
    """Fill masters and buffers from the files of a Hugging Face model. Collective.

    Each rank reads the parts that it owns, and masters are what the files hold, rounded nowhere.
    Raises ModelError on every rank where one of them cannot read its parts.
    """
    failure: str | None = None
    try:
        for fragment in owned_fragments(engine.engine, engine.module):
            for offsets, view in fragment.parts(MASTER):
                weights.fill(fragment.name, offsets, view)
        for name, buffer in _buffers(engine).items():
            if name in weights.tensors:
                weights.fill(name, (0,) * buffer.ndim, buffer)
    except ModelError as error:
        failure = str(error)
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, failure)
    first = next((text for text in everyone if text is not None), None)
    if first is not None:
        raise ModelError(first)
    refresh_parameters(engine.engine)


def _buffers(engine: TrainEngine) -> dict[str, torch.Tensor]:
    """Buffers that a state dict holds, by name; the same on every rank that has them."""
    kept = engine.module.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in engine.module.named_buffers() if name in kept}
