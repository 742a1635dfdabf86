"""What each launcher tells a process about its world."""

from __future__ import annotations

import pytest

from bigtrain.errors import LaunchError
from bigtrain.system.slurm import srun_rendezvous
from bigtrain.system.world import World, has_other_hosts, is_of_srun, ranks_here, read_world

# As mpirun of Open MPI 4.1.4 sets them, beside others.
MPIRUN = {
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_UNIVERSE_SIZE": "6",
    "MASTER_ADDR": "node-1",
}


# As srun of Slurm 22.05 sets them for the third of three tasks on two nodes, beside others.
SRUN = {
    "SLURM_JOB_ID": "41",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_NTASKS": "3",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}


def test_srun() -> None:
    assert ranks_here(SRUN) == 1
    assert has_other_hosts(World(2, 3, 0), SRUN)
    assert srun_rendezvous(SRUN) == {"MASTER_ADDR": "n07", "MASTER_PORT": str(12000 + 41 * 16 + 2)}
    ports = {srun_rendezvous({**SRUN, "SLURM_STEP_ID": str(n)})["MASTER_PORT"] for n in range(4)}
    assert len(ports) == 4  # steps of one job meet at others


def without(given: dict[str, str], part: str) -> dict[str, str]:
    return {name: value for name, value in given.items() if part not in name}


OUTER = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node-1"}
ALONE = {f"OMPI_COMM_WORLD_{name}": "0" for name in ("RANK", "LOCAL_RANK")}
ALONE |= {"OMPI_COMM_WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    ("environment", "world"),
    [
        ({}, World(0, 1, 0)),
        (TORCHRUN, World(3, 4, 1)),
        (MPIRUN, World(5, 6, 1)),
        (MPIRUN | OUTER, World(0, 2, 0)),  # torchrun started by mpirun, one per host, say
        (without(MPIRUN, "MASTER") | ALONE, World(0, 1, 0)),  # one process needs no address
        (SRUN, World(2, 3, 0)),
        (SRUN | {"MASTER_ADDR": "n07"}, World(2, 3, 0)),  # of the script
        (SRUN | OUTER, World(0, 2, 0)),
        (SRUN | MPIRUN, World(5, 6, 1)),
        # sbatch sets the number of tasks of the job for its script too, which is no task of srun.
        (without(SRUN, "STEP"), World(0, 1, 0)),
    ],
)
def test_the_innermost_launcher_counts(environment: dict[str, str], world: World) -> None:
    assert read_world(environment) == world
    assert is_of_srun(environment) == (world == World(2, 3, 0))


def test_incomplete_variables_are_refused() -> None:
    with pytest.raises(LaunchError, match=r"mpirun started 6 .* -> .*-x MASTER_ADDR=HOST"):
        read_world(without(MPIRUN, "MASTER"))
    with pytest.raises(LaunchError, match="not OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_RANK"):
        read_world({"OMPI_COMM_WORLD_RANK": "0"})
    with pytest.raises(LaunchError, match=r"SLURM_STEP_NODELIST .* -> export MASTER_ADDR"):
        srun_rendezvous(without(SRUN, "NODELIST"))
