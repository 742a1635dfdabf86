"""Parts of full parameters and optimizer states that a rank owns, as views of DeepSpeed's storage.

A parameter is sharded twice: tensor parallelism leaves this rank a shard
(`bigtrain.models.parallel.sharding`), ZeRO a flat range of that shard. Frozen parameters that a
base's file stores in another dtype than the run's are kept in host memory
(`ExactParameters.frozen`) by one of the ranks with an equal range.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn

from bigtrain.engine.deepspeed_patches.optimizers import inner_optimizer, masters_of_group
from bigtrain.engine.optimizers.exact_parameters import ExactParameters
from bigtrain.engine.optimizers.masters import cut_parts, master_parts
from bigtrain.engine.optimizers.update_rule import ALLOCATES, RuleOptimizer
from bigtrain.engine.startup.mesh import Mesh
from bigtrain.models.layers.parameters import parameter_of
from bigtrain.models.parallel.sharding import Shard, shard_of
from bigtrain.system.boxes import Box

MASTER = "master"


@dataclass(frozen=True)
class Fragment:
    """Flat range of this rank's shard of the parameter `name`, from element `start` on, with
    storage. tensors: 1-D views by state name (`MASTER`, then optimizer states). capacity,
    is_replicated: see `MasterRange`."""

    name: str
    shard: Shard
    start: int
    tensors: dict[str, torch.Tensor]
    capacity: int | None = None
    is_replicated: bool = False

    def parts(self, state_name: str) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield (rectangle of the full parameter, view) of everything that the fragment covers."""
        yield from cut_parts(self.shard, self.start, self.tensors[state_name])


def owned_fragments(engine: Any, model: nn.Module) -> list[Fragment]:
    """Return all fragments that this rank has of `model`, which `engine` trains, with optimizer
    states once they exist (`ensure_optimizer_states`). Not collective. If several ranks hold a
    fragment, `shard.primary` is true on the rank that writes it."""
    optimizer_states = inner_optimizer(engine).state
    fragments = []
    for part in master_parts(engine, model):
        if not part.count:
            continue
        # The master, and every optimizer state that is shaped like the master.
        tensors = {MASTER: part.of(part.master.data)}
        for state_name, value in optimizer_states.get(part.master, {}).items():
            if torch.is_tensor(value) and value.shape == part.master.shape and value.ndim:
                tensors[state_name] = part.of(value)
        fragments.append(
            Fragment(part.name, part.shard, part.start, tensors, part.capacity, part.is_replicated)
        )
    return fragments


def small_state_fragments(engine: Any, model: nn.Module, tensor_rank: int) -> list[Fragment]:
    """Return optimizer states that are not shaped like masters, full on every rank
    (`RuleOptimizer`). Among tensor-parallel ranks the first writes them."""
    optimizer = inner_optimizer(engine)
    if not isinstance(optimizer, RuleOptimizer):
        return []
    fragments = []
    for name, states in optimizer.small_states():
        shard = shard_of(parameter_of(model, name))
        primary = tensor_rank == 0 and (shard is None or shard.primary)
        for state_name, tensor in states.items():
            full = Shard(tuple(tensor.shape), primary=primary)
            flat = {state_name: tensor.view(-1)}
            fragments.append(Fragment(name, full, 0, flat, is_replicated=True))
    return fragments


@torch.no_grad()
def ensure_optimizer_states(engine: Any) -> None:
    """Make a fresh optimizer allocate its states, without changing masters. It makes one update
    with zero gradients and zero learning rate, since optimizers allocate their states on the first
    update. That update is not counted."""
    optimizer = inner_optimizer(engine)
    if optimizer.state:
        return
    # Replace the parameters of a group by masters with zero gradients for one update.
    masters = [
        masters_of_group(engine.optimizer, index, group)
        for index, group in enumerate(optimizer.param_groups)
    ]
    learning_rates = [group["lr"] for group in optimizer.param_groups]
    parameters = [group["params"] for group in optimizer.param_groups]
    gradients = [[master.grad for master in group] for group in masters]
    for group, group_masters in zip(optimizer.param_groups, masters, strict=True):
        group["lr"] = 0.0
        group[ALLOCATES] = True
        group["params"] = group_masters
        for master in group_masters:
            master.grad = torch.zeros_like(master)
    optimizer.step()
    for index, group in enumerate(optimizer.param_groups):
        group["lr"] = learning_rates[index]
        del group[ALLOCATES]
        group["params"] = parameters[index]
        for master, gradient in zip(masters[index], gradients[index], strict=True):
            master.grad = gradient
    set_optimizer_step_count(engine, 0)


def optimizer_step_count(engine: Any) -> int:
    """Updates the optimizer has made, as it counts them for bias correction."""
    for state in inner_optimizer(engine).state.values():
        if "step" in state:
            return int(state["step"])
    return 0


def set_optimizer_step_count(engine: Any, count: int) -> None:
    """Set the optimizer's own count of updates, in every parameter's state."""
    for state in inner_optimizer(engine).state.values():
        if torch.is_tensor(state.get("step")):
            state["step"].fill_(count)
        elif "step" in state:
            state["step"] = count


def to_fill(
    exact: ExactParameters,
    fragment: Fragment,
    dtype: torch.dtype,
    mesh: Mesh,
    *,
    is_saved: bool = True,
) -> Fragment:
    """Return the fragment into which the values of `fragment`, a part of a frozen parameter, are
    read from a file that stores the parameter in `dtype`. It is `fragment` itself if its tensor
    has this dtype, if `dtype` is not a floating-point dtype, or if nobody needs the exact values:
    no module reads them, and checkpoints do not contain them (`is_saved`). Otherwise it has a new
    tensor of `dtype`, which `exact` keeps if it must."""
    master = fragment.tensors[MASTER]
    exact.frozen.pop(fragment.name, None)
    is_read = fragment.name in exact.values
    if dtype == master.dtype or not dtype.is_floating_point or not (is_saved or is_read):
        return fragment
    values = torch.empty(master.numel(), dtype=dtype)
    keeps_values = is_read or not fragment.is_replicated or _keeps(fragment, mesh)
    exact.frozen[fragment.name] = values if keeps_values else None
    return replace(fragment, tensors={MASTER: values})


def as_saved(exact: ExactParameters, fragments: Iterable[Fragment], mesh: Mesh) -> list[Fragment]:
    """Return `fragments` as a checkpoint stores them: frozen parameters from `exact`, by one of the
    ranks with an equal range."""
    saved = []
    for fragment in fragments:
        name = fragment.name
        if name in exact.owned and MASTER in fragment.tensors:
            flat, number = exact.values[name].view(-1), fragment.tensors[MASTER].numel()
            exact_value = flat.narrow(0, fragment.start, number)
            saved.append(replace(fragment, tensors={MASTER: exact_value}))
        elif name not in exact.frozen:
            saved.append(fragment)
        elif not fragment.is_replicated or _keeps(fragment, mesh):
            values = exact.frozen[name]
            assert values is not None
            saved.append(replace(fragment, tensors={MASTER: values}, is_replicated=False))
    return saved


def _keeps(fragment: Fragment, mesh: Mesh) -> bool:
    """Return whether this rank, among ranks with an equal range, keeps the fragment."""
    group = mesh.expert_replicas if fragment.shard.over == "expert" else mesh.replicas
    return crc32(fragment.name.encode()) % dist.get_world_size(group) == dist.get_rank(group)
