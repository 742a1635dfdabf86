"""Ranks and axes: every process has one place, and groups cut the world the way the axes say."""

from itertools import product

import pytest

from bigtrain.topology import AXES, Coordinates, Topology

SHAPES = [
    Topology(1, 1),
    Topology(8, 2, 2, 2),
    Topology(12, 3, 1, 2, 2),
    Topology(24, 1, 4, 3, 2),
]


def test_tensor_is_innermost_and_data_outermost() -> None:
    topology = Topology(8, data_size=2, tensor_size=2, pipeline_size=2)
    assert topology.coordinates(5) == Coordinates(1, 0, 0, 1)
    assert topology.groups("tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.groups("pipeline") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert topology.groups("data") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.groups("pipeline", "tensor") == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("topology", SHAPES)
def test_every_place_is_taken_once(topology: Topology) -> None:
    places = [topology.coordinates(rank) for rank in range(topology.world_size)]
    assert len(set(places)) == topology.world_size
    assert {(p.data_rank, p.pipeline_rank, p.sequence_rank, p.tensor_rank) for p in places} == set(
        product(*(range(topology.size(axis)) for axis in AXES))
    )


@pytest.mark.parametrize("topology", SHAPES)
@pytest.mark.parametrize("axis", AXES)
def test_groups_cover_the_world_once(topology: Topology, axis: str) -> None:
    groups = topology.groups(axis)  # type: ignore[arg-type]
    assert sorted(rank for group in groups for rank in group) == list(range(topology.world_size))
    assert {len(group) for group in groups} == {topology.size(axis)}  # type: ignore[arg-type]
