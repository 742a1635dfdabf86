"""Rank, world size and local rank, read from the launcher's environment.

Another launcher, which has not started these processes, may have set variables there: the mpirun
that starts one torchrun per host, or the torchrun in whose shell ``deepspeed`` is called. Libraries
that read those would contradict `read_world`. DeepSpeed 0.19.8 fails an assertion if
OMPI_COMM_WORLD_LOCAL_RANK differs from LOCAL_RANK (runtime/engine.py:1959) and reads LOCAL_SIZE
(accelerator/cpu_accelerator.py:71), and torch joins a store of torchrun's agents that does not run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass

from bigtrain.errors import LaunchError
from bigtrain.system.slurm import has_srun_tasks, srun_ranks, srun_tasks_here

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
# Names of the local world size: of torchrun and accelerate, of deepspeed, of mpirun. In this order,
# since mpirun may have started another of these launchers.
_LOCAL_SIZE = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
# Names used by Open MPI's mpirun (man mpirun, "Exported Environment Variables").
_MPIRUN_NAMES = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
# Names used by srun (man srun, "OUTPUT ENVIRONMENT VARIABLES").
_SRUN_NAMES = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")

# Variables that libraries read, and that must not contradict the world.
_RANK_NAMES = ("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
_SIZE_NAMES = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_LOCAL_RANK_NAMES = ("OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")
_LOCAL_SIZE_NAMES = (
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
        """True on the main rank, which writes files and prints to the console."""
        return self.rank == 0


def read_world(environment: Mapping[str, str]) -> World:
    """Return the world that deepspeed, torchrun, accelerate launch, mpirun or srun set up; else a
    single rank.

    Raises LaunchError if variables are not numbers, incomplete, or contradict each other.
    """
    # Variables of launchers; of mpirun and srun only where no launcher set any.
    values = {name: environment[name] for name in _VARIABLES if name in environment}
    if not values and _MPIRUN_NAMES[0] in environment:
        values = _given_by_mpirun(environment)
    elif not values and has_srun_tasks(environment):
        values = srun_ranks(environment)
    if not {"RANK", "WORLD_SIZE"} & values.keys():
        if "MASTER_ADDR" in environment:
            raise LaunchError(
                "the environment has MASTER_ADDR but not RANK and WORLD_SIZE, so this process "
                "has no rank: start with deepspeed, torchrun or accelerate launch "
                "--multi_gpu (also for CPUs: its --cpu starts one process, whatever "
                "--num_processes says), or unset MASTER_ADDR to run one process"
            )
        return World(0, 1, 0)
    if not {"RANK", "WORLD_SIZE"} <= values.keys():
        raise LaunchError(
            f"the environment has {', '.join(values)} but not all of RANK and WORLD_SIZE: start "
            "with deepspeed, torchrun or accelerate launch, or unset them to run one process"
        )
    # The variables must be numbers that agree.
    try:
        rank, size = int(values["RANK"]), int(values["WORLD_SIZE"])
        local_rank = int(values.get("LOCAL_RANK") or _local_rank(rank, size, environment))
    except ValueError as error:
        raise LaunchError(f"launcher environment {values}: {error}") from error
    if not (0 <= rank < size and local_rank >= 0):
        raise LaunchError(f"launcher environment {values}: RANK must be in 0..WORLD_SIZE-1")
    return World(rank, size, local_rank)


def _local_rank(rank: int, size: int, environment: Mapping[str, str]) -> str:
    """Return the local rank if a script has set only RANK and WORLD_SIZE: that of mpirun or srun,
    if its rank and world size are `rank` and `size`; else 0."""
    for names in (_MPIRUN_NAMES, _SRUN_NAMES):
        launcher_rank, launcher_size, local_rank = (environment.get(name, "") for name in names)
        is_same_world = (launcher_rank, launcher_size) == (str(rank), str(size))
        if is_same_world and local_rank.isdecimal():
            return local_rank
    return "0"


def is_of_mpirun(world: World, environment: Mapping[str, str]) -> bool:
    """Return whether mpirun started the ranks directly, without a launcher below it."""
    launcher_values = [environment.get(name) for name in _MPIRUN_NAMES[:2]]
    return launcher_values == [str(world.rank), str(world.size)]


def is_of_srun(environment: Mapping[str, str]) -> bool:
    """Return whether srun started the ranks directly, without a launcher below it."""
    launcher_names = {"RANK", "WORLD_SIZE", _MPIRUN_NAMES[0]}
    return not launcher_names & environment.keys() and has_srun_tasks(environment)


def ranks_here(environment: Mapping[str, str]) -> int | None:
    """Return the ranks on this host from the launcher's environment; None if it is not set there.

    A number larger than the world size belongs to another launcher.
    """
    world_size_text = environment.get("WORLD_SIZE", "")
    world_size = int(world_size_text) if world_size_text.isdecimal() else None
    for name in _LOCAL_SIZE:
        value = environment.get(name, "")
        number = int(value) if value.isdecimal() else 0
        if number > 0 and (world_size is None or number <= world_size):
            return number
    return srun_tasks_here(environment) if is_of_srun(environment) else None


def has_other_hosts(world: World, environment: Mapping[str, str]) -> bool:
    """Return whether the launcher started ranks on other hosts too; False if unknown."""
    return (ranks_here(environment) or world.size) < world.size


def foreign_variables(world: World, environment: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables of other launchers that contradict `world`, with the value that agrees
    with it; None if the variable must be unset."""
    expected = {
        **dict.fromkeys(_RANK_NAMES, str(world.rank)),
        **dict.fromkeys(_SIZE_NAMES, str(world.size)),
        **dict.fromkeys(_LOCAL_RANK_NAMES, str(world.local_rank)),
    }
    local_size = ranks_here(environment)
    if local_size is not None:
        expected |= dict.fromkeys(_LOCAL_SIZE_NAMES, str(local_size))
    overrides: dict[str, str | None] = {
        name: value for name, value in expected.items() if environment.get(name, value) != value
    }
    if local_size is None:
        overrides |= {name: None for name in _LOCAL_SIZE_NAMES if name in environment}
    # An agent of torchrun runs the store if torchrun started this world, as its only role.
    role = {"ROLE_RANK": str(world.rank), "ROLE_WORLD_SIZE": str(world.size)}
    is_of_torchrun = "RANK" in environment and all(
        environment.get(name, value) == value for name, value in role.items()
    )
    if AGENT_STORE in environment and not is_of_torchrun:
        overrides[AGENT_STORE] = None
    return overrides


def describe_foreign(world: World, environment: Mapping[str, str]) -> list[str]:
    """Return a line that names the variables of other launchers, if there are any."""
    foreign = foreign_variables(world, environment)
    if not foreign:
        return []
    named = ", ".join(f"{name}={environment[name]}" for name in foreign)
    return [
        f"ignored, from another launcher: {named} (this is rank {world.rank} of {world.size}, "
        f"local rank {world.local_rank})"
    ]


@contextmanager
def without_foreign(world: World, environment: MutableMapping[str, str]) -> Iterator[None]:
    """Remove variables that contradict `world` from `environment` inside the block."""
    foreign = foreign_variables(world, environment)
    foreign_values = {name: environment[name] for name in foreign}
    for name, value in foreign.items():
        if value is None:
            del environment[name]
        else:
            environment[name] = value
    try:
        yield
    finally:
        environment.update(foreign_values)


def _given_by_mpirun(environment: Mapping[str, str]) -> dict[str, str]:
    """Return mpirun's variables under the usual names. mpirun does not set MASTER_ADDR."""
    missing = [name for name in _MPIRUN_NAMES if name not in environment]
    if missing:
        raise LaunchError(
            f"the environment has {_MPIRUN_NAMES[0]} but not {', '.join(missing)}: start with "
            "mpirun of Open MPI 4 or newer"
        )
    size = environment["OMPI_COMM_WORLD_SIZE"]
    if "MASTER_ADDR" not in environment and size != "1":
        raise LaunchError(
            f"mpirun started {size} processes, but MASTER_ADDR, the host of the first of them, is "
            "not set, so they cannot connect to each other -> deepspeed --launcher openmpi "
            '--launcher_args "-x MASTER_ADDR=HOST -x MASTER_PORT=29500"'
        )
    return {
        name: environment[mpirun_name]
        for name, mpirun_name in zip(_VARIABLES, _MPIRUN_NAMES, strict=True)
    }
