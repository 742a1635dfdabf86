"""Variables that another launcher has left do not reach libraries."""

from __future__ import annotations

import pytest

from bigtrain.system.machine import local_world_size
from bigtrain.system.world import (
    World,
    describe_foreign,
    foreign_variables,
    has_other_hosts,
    is_of_mpirun,
    read_world,
    without_foreign,
)

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "ROLE_RANK": "1",
    "ROLE_WORLD_SIZE": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "MASTER_ADDR": "node-1",
}
DEEPSPEED = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_SIZE": "2",
    "CROSS_RANK": "0",
    "CROSS_SIZE": "1",
    "MASTER_ADDR": "node-1",
}
OF_MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}
OF_TORCHRUN = {
    "LOCAL_WORLD_SIZE": "8",
    "ROLE_RANK": "0",
    "ROLE_WORLD_SIZE": "8",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


@pytest.mark.parametrize("own", [TORCHRUN, DEEPSPEED])
def test_a_launcher_by_itself_contradicts_nothing(own: dict[str, str]) -> None:
    assert foreign_variables(read_world(own), own) == {}
    assert describe_foreign(read_world(own), own) == []


@pytest.mark.parametrize("own", [TORCHRUN, DEEPSPEED])
@pytest.mark.parametrize(
    ("left", "agrees"),
    [
        (
            OF_MPIRUN,
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
        ),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "7"}, {"OMPI_COMM_WORLD_LOCAL_RANK": "1"}),
        ({"MV2_COMM_WORLD_LOCAL_RANK": "what"}, {"MV2_COMM_WORLD_LOCAL_RANK": "1"}),
        ({"SLURM_PROCID": "5", "SLURM_LOCALID": "5", "PMI_RANK": "5"}, {}),
    ],
)
def test_what_another_launcher_left(
    own: dict[str, str], left: dict[str, str], agrees: dict[str, str]
) -> None:
    environment = {**own, **left}
    world = read_world(environment)
    assert world == World(1, 2, 1)
    assert foreign_variables(world, environment) == agrees
    (line,) = describe_foreign(world, environment) or [""]
    assert all(f"{name}={left[name]}" in line for name in agrees)
    before = dict(environment)
    with without_foreign(world, environment):
        assert environment == {**before, **agrees}
    assert environment == before


def test_deepspeed_in_a_shell_of_torchrun() -> None:
    environment = {**OF_TORCHRUN, **DEEPSPEED}
    world = read_world(environment)
    assert foreign_variables(world, environment) == {
        "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": None,
    }
    assert local_world_size(environment) == 2
    assert not has_other_hosts(world, environment)


def test_one_process_in_a_shell_of_torchrun() -> None:
    left = {"TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_SIZE": "many"}
    assert foreign_variables(World(0, 1, 0), left) == {
        "TORCHELASTIC_USE_AGENT_STORE": None,
        "LOCAL_SIZE": None,
    }


def test_local_ranks_of_a_script_that_sets_the_others() -> None:
    given = {"RANK": "5", "WORLD_SIZE": "6", "MASTER_ADDR": "node-1"}
    srun = {"SLURM_PROCID": "5", "SLURM_NTASKS": "6", "SLURM_LOCALID": "1"}
    assert read_world({**given, **srun}) == World(5, 6, 1)
    assert read_world({**given, **srun, "SLURM_PROCID": "0"}) == World(5, 6, 0)  # of sbatch
    of_mpirun = {
        "OMPI_COMM_WORLD_RANK": "5",
        "OMPI_COMM_WORLD_SIZE": "6",
        "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    }
    assert read_world({**given, **of_mpirun}) == World(5, 6, 2)
    assert is_of_mpirun(World(5, 6, 2), of_mpirun)
    assert not is_of_mpirun(World(0, 2, 0), of_mpirun)
