"""Number of threads and set of cores for each rank of a host. Pure.

With a GPU one thread per rank is enough. Where the optimizer is offloaded to host memory, though,
the CPU computes its update, and a launcher that gives each process one thread (torchrun sets
``OMP_NUM_THREADS=1`` where the user has not) leaves most of a host idle. Binding cores by itself
took 15% off a step of ZeRO-Offload in DeepSpeed's measurements (blogs/zenflow-corebinding).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from bigtrain.system.world import ranks_here


@dataclass(frozen=True)
class CpuShare:
    """Threads for torch's operators, and cores to bind to; None: unchanged."""

    num_threads: int | None = None
    cores: frozenset[int] | None = None


def local_world_size(environment: Mapping[str, str]) -> int:
    """Return ranks on this host, from the launcher's environment; 1 if it is not set there."""
    return ranks_here(environment) or 1


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
    """Return the share of rank `local_rank` of its host.

    allowed_cores: cores this process may run on; num_cores: cores that all processes of the host
    may use together (a container may limit them further). computes_on_cpu: True if there is work
    for more than one thread (an offloaded optimizer, or no GPU). threads, bind: the run YAML's
    ``engine.cpu_threads`` and ``engine.bind_cores``, which win if set.

    Without them OMP_NUM_THREADS applies, unless it is the 1 that torchrun sets by default. Cores
    are bound if several ranks compute on the CPU: each gets the same number of adjacent cores.
    They are not bound if there are fewer than two per rank, or if they are bound already
    (fewer are allowed than exist).
    """
    num_processes = local_world_size(environment)
    fair = max(1, num_cores // num_processes)
    by_torchrun = environment.get("OMP_NUM_THREADS") == "1" and "TORCHELASTIC_RUN_ID" in environment
    said = "OMP_NUM_THREADS" in environment and not by_torchrun
    if threads is None and computes_on_cpu and not said:
        threads = fair
    wanted = (computes_on_cpu and num_processes > 1) if bind is None else bind
    cores = sorted(allowed_cores)
    # Fewer allowed than exist: the launcher has bound the ranks already.
    if not wanted or len(cores) < 2 * num_processes or len(cores) < num_cores:
        return CpuShare(threads)
    each = len(cores) // num_processes
    place = local_rank % num_processes
    return CpuShare(threads, frozenset(cores[place * each : (place + 1) * each]))
