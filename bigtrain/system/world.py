"""Rank, world size and local rank, read from the launcher's environment.

Another launcher may have left variables there, which has not started these processes: the mpirun
that starts one torchrun per host, the torchrun in whose shell ``deepspeed`` is called. Libraries
that read those would contradict `read_world`. DeepSpeed 0.19.8 ends with an assertion where
OMPI_COMM_WORLD_LOCAL_RANK is not LOCAL_RANK (runtime/engine.py:1959) and reads LOCAL_SIZE
(accelerator/cpu_accelerator.py:71), and torch joins a store of torchrun's agents that nobody runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass

from bigtrain.errors import LaunchError

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
# The local world size: of torchrun and accelerate, of deepspeed, of mpirun, which may have started
# one of the others.
_LOCAL_SIZE = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
# What Open MPI's mpirun calls them (man mpirun, "Exported Environment Variables").
_OF_MPIRUN = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
# What srun calls them (man srun, "OUTPUT ENVIRONMENT VARIABLES").
_OF_SRUN = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")

# Names of the same numbers, of all launchers.
_RANKS = ("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
_SIZES = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")
_LOCAL_SIZES = (
    *("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
    *("OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
)
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Set by torchrun: its agents run the store at MASTER_PORT."""


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
        local_rank = int(given.get("LOCAL_RANK") or _local_rank(rank, size, environment))
    except ValueError as error:
        raise LaunchError(f"launcher environment {given}: {error}") from error
    if not (0 <= rank < size and local_rank >= 0):
        raise LaunchError(f"launcher environment {given}: RANK must be in 0..WORLD_SIZE-1")
    return World(rank, size, local_rank)


def _local_rank(rank: int, size: int, environment: Mapping[str, str]) -> str:
    """The local rank, where a script has set RANK and WORLD_SIZE only: that of mpirun or srun, if
    they started as many processes and this one has its rank there; else 0."""
    for names in (_OF_MPIRUN, _OF_SRUN):
        theirs = [environment.get(name, "") for name in names]
        if theirs[:2] == [str(rank), str(size)] and theirs[2].isdecimal():
            return theirs[2]
    return "0"


def is_of_mpirun(world: World, environment: Mapping[str, str]) -> bool:
    """Whether mpirun started the ranks themselves, and no launcher below it."""
    theirs = [environment.get(name) for name in _OF_MPIRUN[:2]]
    return theirs == [str(world.rank), str(world.size)]


def ranks_here(environment: Mapping[str, str]) -> int | None:
    """Ranks on this host, as the launcher's environment says; None where it does not.

    A number that is larger than the world is of another launcher.
    """
    given = environment.get("WORLD_SIZE", "")
    most = int(given) if given.isdecimal() else None
    for name in _LOCAL_SIZE:
        value = environment.get(name, "")
        if value.isdecimal() and 0 < int(value) and (most is None or int(value) <= most):
            return int(value)
    return None


def has_other_hosts(world: World, environment: Mapping[str, str]) -> bool:
    """Whether the launcher started ranks on other hosts too; False where it does not say."""
    return (ranks_here(environment) or world.size) < world.size


def foreign_variables(world: World, environment: Mapping[str, str]) -> dict[str, str | None]:
    """The variables of other launchers that contradict `world`, with the value that agrees with it;
    None for those that must not be there."""
    facts = {
        **dict.fromkeys(_RANKS, str(world.rank)),
        **dict.fromkeys(_SIZES, str(world.size)),
        **dict.fromkeys(_LOCAL_RANKS, str(world.local_rank)),
    }
    here = ranks_here(environment)
    if here is not None:
        facts |= dict.fromkeys(_LOCAL_SIZES, str(here))
    found: dict[str, str | None] = {
        name: value for name, value in facts.items() if environment.get(name, value) != value
    }
    if here is None:
        found |= {name: None for name in _LOCAL_SIZES if name in environment}
    if AGENT_STORE in environment and not _is_of_torchrun(world, environment):
        found[AGENT_STORE] = None
    return found


def _is_of_torchrun(world: World, environment: Mapping[str, str]) -> bool:
    """Whether torchrun's variables are of this world: of the one role that its command line has."""
    if "RANK" not in environment:
        return False
    own = {"ROLE_RANK": str(world.rank), "ROLE_WORLD_SIZE": str(world.size)}
    return all(environment.get(name, value) == value for name, value in own.items())


def describe_foreign(world: World, environment: Mapping[str, str]) -> list[str]:
    """A line that names the variables of other launchers, if there are any."""
    found = foreign_variables(world, environment)
    if not found:
        return []
    named = ", ".join(f"{name}={environment[name]}" for name in found)
    return [
        f"ignored, of another launcher: {named} (this is rank {world.rank} of {world.size}, "
        f"local rank {world.local_rank})"
    ]


@contextmanager
def without_foreign(world: World, environment: MutableMapping[str, str]) -> Iterator[None]:
    """Inside, `environment` has no variable that contradicts `world`."""
    found = foreign_variables(world, environment)
    before = {name: environment[name] for name in found}
    for name, value in found.items():
        if value is None:
            del environment[name]
        else:
            environment[name] = value
    try:
        yield
    finally:
        environment.update(before)


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
