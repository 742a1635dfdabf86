"""Rank, world size and local rank, read from the launcher's environment. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bigtrain.errors import LaunchError

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
# The local world size: of torchrun and accelerate, of mpirun, of deepspeed.
_LOCAL_SIZE = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_SIZE")
# What Open MPI's mpirun calls them (man mpirun, "Exported Environment Variables").
_OF_MPIRUN = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")


@dataclass(frozen=True)
class World:
    """This process's global rank, the world size, and its local rank on its host."""

    rank: int
    size: int
    local_rank: int

    @property
    def is_main(self) -> bool:
        """Whether this is the main rank, which writes files and prints to the console."""
        return self.rank == 0


def read_world(environment: Mapping[str, str]) -> World:
    """The world that deepspeed, torchrun, accelerate launch or mpirun set up; else a single rank.

    Raises LaunchError where variables are not numbers, incomplete, or contradict each other.
    """
    given = {name: environment[name] for name in _VARIABLES if name in environment}
    if not given and _OF_MPIRUN[0] in environment:
        given = _given_by_mpirun(environment)
    if not {"RANK", "WORLD_SIZE"} & given.keys():
        if "MASTER_ADDR" in environment:
            raise LaunchError(
                "the environment has MASTER_ADDR but not RANK and WORLD_SIZE, so this process does "
                "not know its rank: start with deepspeed, torchrun or accelerate launch "
                "--multi_gpu (also for CPUs: its --cpu starts one process, whatever "
                "--num_processes says), or unset MASTER_ADDR to run one process"
            )
        return World(0, 1, 0)
    if not {"RANK", "WORLD_SIZE"} <= given.keys():
        raise LaunchError(
            f"the environment has {', '.join(given)} but not all of RANK and WORLD_SIZE: start "
            "with deepspeed, torchrun or accelerate launch, or unset them to run one process"
        )
    try:
        rank, size = int(given["RANK"]), int(given["WORLD_SIZE"])
        local_rank = int(given.get("LOCAL_RANK", 0))
    except ValueError as error:
        raise LaunchError(f"launcher environment {given}: {error}") from error
    if not (0 <= rank < size and local_rank >= 0):
        raise LaunchError(f"launcher environment {given}: RANK must be in 0..WORLD_SIZE-1")
    return World(rank, size, local_rank)


def has_other_hosts(world: World, environment: Mapping[str, str]) -> bool:
    """Whether the launcher started ranks on other hosts too; False where it does not say."""
    here = next((environment[name] for name in _LOCAL_SIZE if environment.get(name)), "")
    return here.isdecimal() and int(here) < world.size


def _given_by_mpirun(environment: Mapping[str, str]) -> dict[str, str]:
    """mpirun's variables under the usual names. mpirun does not set MASTER_ADDR."""
    missing = [name for name in _OF_MPIRUN if name not in environment]
    if missing:
        raise LaunchError(
            f"the environment has {_OF_MPIRUN[0]} but not {', '.join(missing)}: start with mpirun "
            "of Open MPI 4 or newer"
        )
    size = environment["OMPI_COMM_WORLD_SIZE"]
    if "MASTER_ADDR" not in environment and size != "1":
        raise LaunchError(
            f"mpirun started {size} processes, but MASTER_ADDR, the host of the first of them, is "
            "not set, so they cannot find each other -> deepspeed --launcher openmpi "
            '--launcher_args "-x MASTER_ADDR=HOST -x MASTER_PORT=29500"'
        )
    return {name: environment[theirs] for name, theirs in zip(_VARIABLES, _OF_MPIRUN, strict=True)}
