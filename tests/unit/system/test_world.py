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
    assert read_world(SRUN) == World(2, 3, 0)
    assert ranks_here(SRUN) == 1
    assert has_other_hosts(World(2, 3, 0), SRUN)
    assert srun_rendezvous(SRUN) == {"MASTER_ADDR": "n07", "MASTER_PORT": str(12000 + 41 * 16 + 2)}


def test_steps_of_one_job_meet_at_other_ports() -> None:
    ports = {srun_rendezvous({**SRUN, "SLURM_STEP_ID": str(n)})["MASTER_PORT"] for n in range(4)}
    assert len(ports) == 4


def test_an_address_of_the_script_does_not_hide_srun() -> None:
    assert read_world({**SRUN, "MASTER_ADDR": "n07"}) == World(2, 3, 0)


def test_a_launcher_below_srun_counts() -> None:
    given = {**SRUN, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    assert read_world(given) == World(0, 2, 0)
    assert not is_of_srun(given)
    mpirun = {**SRUN, **MPIRUN}
    assert read_world(mpirun) == World(5, 6, 1)


def test_a_batch_script_is_one_process() -> None:
    """sbatch sets the number of tasks of the job for its script too, which is no task of srun."""
    script = {name: value for name, value in SRUN.items() if "STEP" not in name}
    assert read_world(script) == World(0, 1, 0)


def test_srun_without_nodes_is_refused() -> None:
    given = {name: value for name, value in SRUN.items() if "NODELIST" not in name}
    with pytest.raises(LaunchError, match=r"SLURM_STEP_NODELIST .* -> export MASTER_ADDR"):
        srun_rendezvous(given)
