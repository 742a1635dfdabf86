"""Ranks and axes: every process has one place, and groups cut the world the way the axes say."""

from itertools import product

import pytest

from bigtrain.settings.degrees import AXES, MODEL_AXES
from bigtrain.settings.topology import Coordinates, Topology

SHAPES = [
    Topology(data_size=1),
    Topology(data_size=2, tensor_size=2, pipeline_size=2),
    Topology(data_size=3, pipeline_size=2, sequence_size=2),
    Topology(tensor_size=4, pipeline_size=3, sequence_size=2),
]


def test_tensor_is_innermost_and_data_outermost() -> None:
    topology = Topology(data_size=2, tensor_size=2, pipeline_size=2)
    assert topology.coordinates(5) == Coordinates(1, 0, 0, 1)
    assert topology.groups("tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.groups("pipeline") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert topology.groups("data") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.groups("pipeline", "tensor") == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("topology", SHAPES)
def test_every_place_is_taken_once_and_groups_cover_the_world(topology: Topology) -> None:
    places = [topology.coordinates(rank) for rank in range(topology.world_size)]
    assert len(set(places)) == topology.world_size
    assert {tuple(getattr(place, f"{axis}_rank") for axis in AXES) for place in places} == set(
        product(*(range(topology.size(axis)) for axis in AXES))
    )
    for axis in AXES:
        groups = topology.groups(axis)
        assert sorted(rank for group in groups for rank in group) == [*range(topology.world_size)]
        assert {len(group) for group in groups} == {topology.size(axis)}


def test_one_of_the_ranks_with_the_same_samples_counts() -> None:
    topology = Topology(data_size=2, pipeline_size=2, sequence_size=2, tensor_size=2)
    places = [topology.coordinates(rank) for rank in range(topology.world_size)]
    assert [rank for rank, place in enumerate(places) if place.is_first("data")] == [0, 8]
    assert [rank for rank, place in enumerate(places) if place.is_first("pipeline")] == [0, 4]
    counting = [rank for rank, place in enumerate(places) if place.is_first("data", *MODEL_AXES)]
    assert counting == [0, 1, 4, 5, 8, 9, 12, 13]


def test_ranks_that_divide_the_experts_are_neighbours_in_data_x_sequence() -> None:
    assert Topology(data_size=4, expert_size=2).expert_groups() == [[0, 1], [2, 3]]
    assert Topology(data_size=4, expert_size=2).expert_replica_groups() == [[0, 2], [1, 3]]
    assert Topology(data_size=4).expert_groups() == [[0], [1], [2], [3]]
    assert Topology(data_size=4).expert_replica_groups() == [[0, 1, 2, 3]]
    # Those of one sample first, and none of another stage.
    topology = Topology(data_size=2, pipeline_size=2, sequence_size=2, expert_size=2)
    assert topology.expert_groups() == [[0, 1], [4, 5], [2, 3], [6, 7]]
    assert topology.expert_replica_groups() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert Topology(data_size=8, expert_size=8).expert_replica_groups() == [[n] for n in range(8)]


def test_people_are_told_of_the_order_of_ranks() -> None:
    assert Topology(data_size=1).describe() == ""
    assert Topology(data_size=4).describe() == "4 ranks = 4 data-parallel; rank = data"
    assert Topology(data_size=4, expert_size=2).describe() == (
        "4 ranks = 4 data-parallel; 2 divide the experts; rank = data"
    )
    assert Topology(data_size=2, tensor_size=4, pipeline_size=3).describe() == (
        "24 ranks = 2 data x 3 pipeline x 4 tensor-parallel; "
        "rank = (data * 3 + pipeline) * 4 + tensor"
    )


def test_groups_on_several_hosts_are_told() -> None:
    topology = Topology(data_size=3, tensor_size=4)
    assert topology.crossings(["a"] * 4 + ["b"] * 8) == []
    assert Topology(data_size=1, pipeline_size=12).crossings(list("abcdefghijkl")) == []
    (text,) = topology.crossings(["a"] * 6 + ["b"] * 6)
    assert text == (
        "1 tensor-parallel groups are on several hosts (ranks 4, 5, 6, 7 on a, b) and exchange in "
        "every layer -> set parallel.tensor to a divisor of the number of ranks per host"
    )
    (text,) = Topology(data_size=1, sequence_size=4).crossings(["a", "b", "a", "b"])
    assert text.startswith("1 sequence-parallel groups")
    (text,) = Topology(data_size=4, expert_size=2).crossings(["a", "a", "a", "b"])
    assert text.startswith("1 expert-parallel groups are on several hosts (ranks 2, 3 on a, b)")
