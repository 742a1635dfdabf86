"""What each launcher tells a process about its world."""

from __future__ import annotations

import pytest

from bigtrain.errors import LaunchError
from bigtrain.system.world import World, read_world

# As mpirun of Open MPI 4.1.4 sets them, beside others.
MPIRUN = {
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_UNIVERSE_SIZE": "6",
    "MASTER_ADDR": "node-1",
}


def test_no_launcher() -> None:
    assert read_world({}) == World(0, 1, 0)


def test_torchrun_deepspeed_accelerate() -> None:
    given = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node-1"}
    assert read_world(given) == World(3, 4, 1)


def test_mpirun() -> None:
    assert read_world(MPIRUN) == World(5, 6, 1)


def test_a_launcher_below_mpirun_counts() -> None:
    """torchrun started by mpirun, one per host, say."""
    assert read_world({**MPIRUN, "RANK": "0", "WORLD_SIZE": "2"}) == World(0, 2, 0)


def test_one_process_of_mpirun_needs_no_address() -> None:
    alone = {**MPIRUN, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}
    alone["OMPI_COMM_WORLD_LOCAL_RANK"] = "0"
    del alone["MASTER_ADDR"]
    assert read_world(alone) == World(0, 1, 0)


def test_mpirun_without_an_address_is_refused() -> None:
    given = {name: value for name, value in MPIRUN.items() if name != "MASTER_ADDR"}
    with pytest.raises(LaunchError, match=r"mpirun started 6 .* -> .*-x MASTER_ADDR=HOST"):
        read_world(given)


def test_another_mpirun_is_refused() -> None:
    with pytest.raises(LaunchError, match="not OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_RANK"):
        read_world({"OMPI_COMM_WORLD_RANK": "0"})
