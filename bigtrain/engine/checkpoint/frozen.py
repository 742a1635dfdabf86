"""Frozen parameters in checkpoints: the bytes of the base's files, independent of the run's dtype.

DeepSpeed holds a frozen parameter in the run's dtype. Where a file holds it in another one, that is
kept in host memory (`ExactParameters.frozen`), by one of the ranks that have the same range.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from zlib import crc32

import torch
import torch.distributed as dist

from bigtrain.engine.checkpoint.fragments import MASTER, Fragment
from bigtrain.engine.optimizers.exact_parameters import ExactParameters
from bigtrain.engine.startup.mesh import Mesh


def to_fill(
    exact: ExactParameters,
    fragment: Fragment,
    dtype: torch.dtype,
    mesh: Mesh,
    *,
    is_saved: bool = True,
) -> Fragment:
    """Return `fragment`, of a frozen parameter, for reading a file that stores it in `dtype`: with
    its own tensor if that has the dtype, else with one that `exact` keeps if modules read it or
    checkpoints contain it (`is_saved`)."""
    master = fragment.tensors[MASTER]
    exact.frozen.pop(fragment.name, None)
    is_read = fragment.name in exact.values
    if dtype == master.dtype or not dtype.is_floating_point or not (is_saved or is_read):
        return fragment
    values = torch.empty(master.numel(), dtype=dtype)
    keeps = is_read or not fragment.is_replicated or _keeps(fragment, mesh)
    exact.frozen[fragment.name] = values if keeps else None
    return replace(fragment, tensors={MASTER: values})


def as_saved(exact: ExactParameters, fragments: Iterable[Fragment], mesh: Mesh) -> list[Fragment]:
    """Return `fragments` as a checkpoint stores them: frozen parameters from `exact`, by one of the
    ranks that have the same range."""
    saved = []
    for fragment in fragments:
        name = fragment.name
        if name in exact.owned and MASTER in fragment.tensors:
            flat, number = exact.values[name].view(-1), fragment.tensors[MASTER].numel()
            own = flat.narrow(0, fragment.start, number)
            saved.append(replace(fragment, tensors={MASTER: own}))
        elif name not in exact.frozen:
            saved.append(fragment)
        elif not fragment.is_replicated or _keeps(fragment, mesh):
            values = exact.frozen[name]
            assert values is not None
            saved.append(replace(fragment, tensors={MASTER: values}, is_replicated=False))
    return saved


def _keeps(fragment: Fragment, mesh: Mesh) -> bool:
    """Return whether this rank, of those that have the same range, is the one that keeps it."""
    group = mesh.expert_replicas if fragment.shard.over == "expert" else mesh.replicas
    return crc32(fragment.name.encode()) % dist.get_world_size(group) == dist.get_rank(group)
