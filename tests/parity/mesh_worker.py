"""One of four processes that opens meshes of several topologies and sums ranks over each group."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from bigtrain.engine.startup.mesh import ModelParallelUnit, open_mesh, warm_up
from bigtrain.engine.startup.process_group import process_group
from bigtrain.settings.degrees import AXES, MODEL_AXES, REPLICA_AXES
from bigtrain.settings.topology import Topology
from bigtrain.system.world import read_world

TOPOLOGIES = [
    Topology(data_size=4),
    Topology(data_size=2, tensor_size=2),
    Topology(data_size=1, tensor_size=2, pipeline_size=2),
    Topology(data_size=1, tensor_size=4),
    Topology(data_size=2, sequence_size=2),
    Topology(data_size=4, expert_size=2),
    Topology(data_size=2, sequence_size=2, expert_size=4),
    Topology(data_size=2, pipeline_size=2, expert_size=2),
]
COMBINED = {"replicas": REPLICA_AXES, "model": MODEL_AXES}


def check(topology: Topology, rank: int) -> None:
    mesh = open_mesh(topology, rank)
    warm_up(mesh, torch.device("cpu"))
    names = {axis: (axis,) for axis in AXES} | COMBINED
    for name, axes in names.items():
        (members,) = [group for group in topology.groups(*axes) if rank in group]
        total = torch.tensor(rank)
        dist.all_reduce(total, group=getattr(mesh, name))
        assert int(total) == sum(members), (topology, name, total, members)
    own = {"expert": topology.expert_groups(), "expert_replicas": topology.expert_replica_groups()}
    for name, groups in own.items():
        (members,) = [group for group in groups if rank in group]
        assert dist.get_process_group_ranks(getattr(mesh, name)) == members, (topology, name)
    unit = ModelParallelUnit(mesh)
    place = topology.coordinates(rank)
    assert unit.get_tensor_model_parallel_rank() == place.tensor_rank
    assert unit.get_data_parallel_group() is mesh.replicas
    assert unit.get_data_parallel_world_size() == topology.partition_size
    assert unit.get_model_parallel_world_size() == math.prod(
        topology.size(axis) for axis in MODEL_AXES
    )
    assert not hasattr(unit, "get_sequence_parallel_world_size")
    assert not hasattr(unit, "initialize_sequence_parallel")


if __name__ == "__main__":
    world = read_world(os.environ)
    with process_group(world):
        for topology in TOPOLOGIES:
            check(topology, world.rank)
    Path(sys.argv[1], f"{world.rank}.done").touch()
