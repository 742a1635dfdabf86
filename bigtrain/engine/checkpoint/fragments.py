"""Parts of full parameters and optimizer states that a rank owns, as views of DeepSpeed's storage.

A parameter is sharded twice: tensor parallelism gives this rank a shard
(`bigtrain.models.parallel.sharding`), and ZeRO a flat range of the shard. If a base's file stores a
frozen parameter in another dtype than the run's, the values of the file are kept in host memory
(`ExactParameters.frozen`) on one of the ranks with an equal range.
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
        """Yield the rectangles of the full parameter that the fragment covers, with views."""
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
    """Make a fresh optimizer allocate its states, without changing masters: make one update with
    zero gradients and zero learning rate, since optimizers allocate states on the first update. The
    update is not counted."""
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
    """Return the number of updates that the optimizer has made, as it counts them for bias
    correction."""
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
    read from a file that stores the parameter in `dtype`: `fragment` itself, or one with a new
    tensor of `dtype`, which `exact` keeps on this rank if it has to. A new tensor is needed if the
    dtypes differ, `dtype` is a floating-point dtype, and the exact values are used: by a module, or
    by checkpoints (`is_saved`)."""
    master = fragment.tensors[MASTER]
    exact.frozen.pop(fragment.name, None)
    is_read = fragment.name in exact.values
    if dtype == master.dtype or not dtype.is_floating_point or not (is_saved or is_read):
        return fragment
    values = torch.empty(master.numel(), dtype=dtype)
    keeps_values = is_read or not fragment.is_replicated or _is_keeper(fragment, mesh)
    exact.frozen[fragment.name] = values if keeps_values else None
    return replace(fragment, tensors={MASTER: values})


def as_saved(exact: ExactParameters, fragments: Iterable[Fragment], mesh: Mesh) -> list[Fragment]:
    """Return `fragments` as a checkpoint stores them: frozen parameters from `exact`, by one of the
    ranks with an equal range."""
    saved = []
    for fragment in fragments:
        name = fragment.name
        if name in exact.owned and MASTER in fragment.tensors:
            flat, num_elements = exact.values[name].view(-1), fragment.tensors[MASTER].numel()
            exact_value = flat.narrow(0, fragment.start, num_elements)
            saved.append(replace(fragment, tensors={MASTER: exact_value}))
        elif name not in exact.frozen:
            saved.append(fragment)
        elif not fragment.is_replicated or _is_keeper(fragment, mesh):
            values = exact.frozen[name]
            assert values is not None
            saved.append(replace(fragment, tensors={MASTER: values}, is_replicated=False))
    return saved


def _is_keeper(fragment: Fragment, mesh: Mesh) -> bool:
    """Return whether this rank, among ranks with an equal range, keeps the fragment. The names
    spread the fragments over the ranks."""
    group = mesh.expert_replicas if fragment.shard.over == "expert" else mesh.replicas
    return crc32(fragment.name.encode()) % dist.get_world_size(group) == dist.get_rank(group)
