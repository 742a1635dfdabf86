"""Ranks are drawn with their coordinates; of thousands one replica."""

from __future__ import annotations

import re
from typing import Any

import pytest

from bigtrain.report.topology import layout_of, topology_html
from bigtrain.settings.topology import Topology
from tests.support.run_directories import environment


def test_coordinates_are_those_of_a_run() -> None:
    layout = layout_of(environment(data=2, tensor=4, pipeline=2))
    assert layout is not None
    topology = Topology(data_size=2, tensor_size=4, pipeline_size=2)
    for rank in range(16):
        place = vars(topology.coordinates(rank))
        found = {f"{axis}_rank": number for axis, number in layout.coordinates(rank).items()}
        assert found == place


def test_each_rank_is_drawn_on_its_host() -> None:
    html = topology_html(environment(data=2, tensor=4, pipeline=2, hosts=2))
    drawings = html.split("<svg")[1:]
    assert len(drawings) == 2
    assert re.findall(r"<title>rank (\d+): ", drawings[1]) == [str(rank) for rank in range(8, 16)]
    assert "rank 13: data 1, pipeline 1, tensor 1" in drawings[1]
    assert ">d1 p1 t1<" in drawings[1]
    assert "16 ranks = 2 data-parallel x 2 pipeline-parallel x 4 tensor-parallel" in html
    assert "on 2 hosts with 8 ranks each." in html


def test_names_of_hosts_are_text() -> None:
    html = topology_html({**environment(data=1), "hosts": {"<b>&": [0]}})
    assert "One rank." in html
    assert "<b>" not in html
    assert html.count("&lt;b&gt;&amp;") == 2  # the name, and the drawing's label


def test_thousands_of_ranks_are_one_replica() -> None:
    html = topology_html(environment(data=256, tensor=8, pipeline=4, hosts=1024))
    assert html.count("<title>") == 32
    assert "one of 256 replicas" in html
    assert "8,192 ranks = 256 data-parallel x 4 pipeline-parallel x 8 tensor-parallel" in html
    assert "1,024 hosts and their ranks" in html
    assert "<td>node1</td><td>8 to 15</td>" in html


def test_a_replica_of_thousands_is_words() -> None:
    html = topology_html(environment(data=2, tensor=64, pipeline=32))
    assert "<svg" not in html
    assert "2,048 ranks, too many to draw one by one" in html


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        {"topology": 3},
        {"topology": {"world_size": 0, "data_size": 0}},
        {"topology": {"world_size": 7, "data_size": 2}},
        {"topology": {"world_size": "2", "data_size": 2}},
        {"topology": {"world_size": 2, "data_size": [2]}},
    ],
)
def test_what_is_no_topology_is_said(value: Any) -> None:
    assert "does not record the ranks" in topology_html(value)


@pytest.mark.parametrize(
    "hosts", [None, [], {"a": [0]}, {"a": [0, 0]}, {"a": ["0", "1"]}, {"a": 2}]
)
def test_ranks_without_hosts_are_drawn_together(hosts: Any) -> None:
    html = topology_html({**environment(data=2), "hosts": hosts})
    assert html.count("<title>") == 2
    assert "host" not in html.split("<svg")[0]


@pytest.mark.parametrize("order", [None, [], ["data"], ["x"] * 4, 5])
def test_an_order_that_is_none_is_the_usual_one(order: Any) -> None:
    layout = layout_of({**environment(data=2, tensor=2), "rank_order": order})
    assert layout is not None
    assert layout.coordinates(1)["tensor"] == 1
