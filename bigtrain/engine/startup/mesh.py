"""Process groups of a topology, and DeepSpeed's view of the groups (`mpu`)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bigtrain.errors import LaunchError
from bigtrain.settings.degrees import MODEL_AXES, REPLICA_AXES
from bigtrain.settings.sections.running import COLLECTIVE_TIMEOUT_SECONDS
from bigtrain.settings.topology import Coordinates, Topology


def groups_of(topology: Topology) -> dict[str, list[list[int]]]:
    """Return the ranks of all groups by name, in the order in which every rank creates the groups.
    "replicas" are the ranks with equal parameters, except for experts, over which ZeRO partitions
    parameters and gradients are averaged."""
    return {
        "tensor": topology.groups("tensor"),
        "sequence": topology.groups("sequence"),
        "ulysses": topology.ulysses_groups(),
        "ring": topology.ring_groups(),
        "pipeline": topology.groups("pipeline"),
        "data": topology.groups("data"),
        "replicas": topology.groups(*REPLICA_AXES),
        "model": topology.groups(*MODEL_AXES),
        "expert": topology.expert_groups(),
        "expert_replicas": topology.expert_replica_groups(),
    }


@dataclass(frozen=True)
class Mesh:
    """Position of `rank` in a topology, and the groups that contain it. No group is None, which
    means the full world in torch and DeepSpeed. replicas: the ranks with equal parameters. model:
    the ranks that hold one copy of the model together. ulysses, ring: the ranks that share samples
    and divide the heads, or pass keys around. expert: the replicas that divide the experts.
    expert_replicas: the ranks with equal experts."""

    topology: Topology
    rank: int
    tensor: dist.ProcessGroup
    sequence: dist.ProcessGroup
    ulysses: dist.ProcessGroup
    ring: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    data: dist.ProcessGroup
    replicas: dist.ProcessGroup
    model: dist.ProcessGroup
    expert: dist.ProcessGroup
    expert_replicas: dist.ProcessGroup

    @property
    def coordinates(self) -> Coordinates:
        return self.topology.coordinates(self.rank)


def open_mesh(
    topology: Topology,
    rank: int,
    collective_timeout_seconds: float = COLLECTIVE_TIMEOUT_SECONDS,
) -> Mesh:
    """Create the groups of `topology` for rank `rank`. Collective over all ranks. An axis of size 1
    costs nothing, and equal groups are made once. The groups exist as long as the default process
    group."""
    assert dist.get_world_size() == topology.world_size
    assert dist.get_rank() == rank
    # Set explicitly: torch's default for NCCL groups is 10 minutes, not the world's timeout.
    timeout = timedelta(seconds=collective_timeout_seconds)
    new_groups: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}
    groups_by_name = {}
    for name, groups in groups_of(topology).items():
        key = tuple(map(tuple, groups))
        if key not in new_groups:
            new_groups[key] = _new_group(groups, rank, timeout)
        groups_by_name[name] = new_groups[key]
    return Mesh(topology, rank, **groups_by_name)


def open_holders(mesh: Mesh) -> dict[bool, dist.ProcessGroup]:
    """Return two groups of this rank: the ranks with parts of equal parameters (False), and of
    equal experts (True). Collective over all ranks. Not in `Mesh`, since few runs need them."""
    topology = mesh.topology
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_SECONDS)
    dense = _new_group(topology.holder_groups(), mesh.rank, timeout)
    if topology.expert_size == 1:
        return {False: dense, True: dense}
    return {False: dense, True: _new_group(topology.expert_holder_groups(), mesh.rank, timeout)}


def warm_up(mesh: Mesh, device: torch.device) -> None:
    """Use every group of `mesh` with several ranks once. Collective over all ranks. NCCL opens a
    group's connections at the first collective, which takes seconds at scale; a broken device or
    cable is then an error that names the group, instead of an error in the first step."""
    checked_ids: set[int] = set()
    for name in groups_of(mesh.topology):
        group: dist.ProcessGroup = getattr(mesh, name)
        if id(group) in checked_ids or dist.get_world_size(group) == 1:
            continue
        checked_ids.add(id(group))
        total = torch.ones((), device=device)
        dist.all_reduce(total, group=group)
        size = dist.get_world_size(group)
        if int(total) != size:  # waits for the device, so that an error belongs to this group
            raise LaunchError(
                f"the {name} group of {size} ranks adds up to {int(total)} -> bigtrain doctor "
                "tests every pair of hosts"
            )


def _new_group(groups: list[list[int]], rank: int, timeout: timedelta) -> dist.ProcessGroup:
    """Create all `groups`, equally large; return the one with `rank`. Collective."""
    new_group: Any
    if len(groups) == 1:
        new_group = dist.group.WORLD
    elif len(groups[0]) == 1:
        new_group = dist.new_group([rank], timeout, use_local_synchronization=True)
    else:
        new_group, _ = dist.new_subgroups_by_enumeration(groups, timeout)
    assert isinstance(new_group, dist.ProcessGroup)
    return new_group


class ModelParallelUnit:
    """DeepSpeed's `mpu`: groups as ``get_NAME_group``, ``_world_size`` and ``_rank`` (0.19.8):
    ``model_parallel`` in runtime/zero and runtime/utils.py, ``tensor_model_parallel`` and
    ``pipeline_model_parallel`` in utils/bwc.py, ``data_parallel`` in utils/groups.py.
    Sequence-parallel ranks appear as replicas: DeepSpeed would not count them when it averages."""

    def __init__(self, mesh: Mesh) -> None:
        self._groups = {
            "model_parallel": mesh.model,
            "tensor_model_parallel": mesh.tensor,
            "pipeline_model_parallel": mesh.pipeline,
            "data_parallel": mesh.replicas,
        }

    def __getattr__(self, name: str) -> Any:
        # DeepSpeed recognizes the type of an mpu by the methods that it has, so it has only these.
        for group_name, group in self.__dict__.get("_groups", {}).items():
            if name == f"get_{group_name}_group":
                return lambda: group
            if name == f"get_{group_name}_group_ranks":
                return lambda: dist.get_process_group_ranks(group)
            if name == f"get_{group_name}_world_size":
                return lambda: dist.get_world_size(group)
            if name == f"get_{group_name}_rank":
                return lambda: dist.get_rank(group)
        raise AttributeError(name)
