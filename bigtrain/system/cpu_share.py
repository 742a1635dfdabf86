"""Threads and cores of one process of several on a host. Pure.

A GPU does the arithmetic, and one thread feeds it. Where the optimizer is in host memory, though,
its update is the processor's work, and a launcher that gives each process one thread (torchrun
sets ``OMP_NUM_THREADS=1`` where the user has not) leaves most of a host idle. The binding of cores
alone took 15% off a step of ZeRO-Offload in DeepSpeed's figures (blogs/zenflow-corebinding).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_SIZE")


@dataclass(frozen=True)
class CpuShare:
    """What a process is to use: threads of torch's own operators, and cores; None: as it is."""

    num_threads: int | None = None
    cores: frozenset[int] | None = None


def processes_here(environment: Mapping[str, str]) -> int:
    """How many processes the launcher started on this host; 1 where it does not say."""
    given = next((environment[name] for name in _LOCAL_SIZES if environment.get(name)), "1")
    return max(1, int(given)) if given.isdecimal() else 1


def cpu_share(
    environment: Mapping[str, str],
    local_rank: int,
    allowed_cores: Collection[int],
    num_cores: int,
    *,
    computes_on_cpu: bool,
    threads: int | None = None,
    bind: bool | None = None,
) -> CpuShare:
    """The share of the process `local_rank` of its host.

    allowed_cores: that the scheduler lets this process run on; num_cores: that all processes of
    the host may use together, which a container may limit further. computes_on_cpu: whether there
    is work for more than one thread: an optimizer in host memory, or no GPU. threads, bind: what
    the run YAML says (``engine.cpu_threads``, ``engine.bind_cores``), which wins.

    Without these, OMP_NUM_THREADS counts, but for the 1 that torchrun sets for everybody. Cores
    are bound where several processes compute, each to as many neighbours. They stay as they are
    where there are too few, and where somebody has bound them (fewer are allowed than there are).
    """
    num_processes = processes_here(environment)
    fair = max(1, num_cores // num_processes)
    by_torchrun = environment.get("OMP_NUM_THREADS") == "1" and "TORCHELASTIC_RUN_ID" in environment
    said = "OMP_NUM_THREADS" in environment and not by_torchrun
    if threads is None and computes_on_cpu and not said:
        threads = fair
    wanted = (computes_on_cpu and num_processes > 1) if bind is None else bind
    cores = sorted(allowed_cores)
    # As wide as its share: another process's cores are not among them, and there is nothing to do.
    if not wanted or len(cores) < 2 * num_processes or len(cores) < num_cores:
        return CpuShare(threads)
    each = len(cores) // num_processes
    place = local_rank % num_processes
    return CpuShare(threads, frozenset(cores[place * each : (place + 1) * each]))
