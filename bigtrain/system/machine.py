"""Cores, memory, threads, environment variables, library versions and compilers of this machine.
Pure.

With a GPU one thread per rank is enough. Where the optimizer is offloaded to host memory, though,
the CPU computes its update, and a launcher that gives each process one thread (torchrun sets
``OMP_NUM_THREADS=1`` where the user has not) leaves most of a host idle. Binding cores by itself
took 15% off a step of ZeRO-Offload in DeepSpeed's measurements (blogs/zenflow-corebinding).

Environment variables of NCCL and of CUDA's allocator take effect when the process group is created
and when CUDA first allocates memory, so they must be set before. A variable that the user has set
is never changed. All ranks of a run must share the versions; no library is imported.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sysconfig
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import bigtrain
from bigtrain.system.world import ranks_here

ROOT = Path("/")
UNLIMITED_BYTES = 1 << 62
"""Used if the memory size is unknown, so that it is not a limit."""


@dataclass(frozen=True)
class Machine:
    """Cores and free memory that this process may use."""

    num_cores: int
    memory_bytes: int


def this_machine(environment: Mapping[str, str], root: Path = ROOT) -> Machine:
    """Return cores and memory within the CPU affinity and the cgroup (version 2) limits of this
    process.

    Divided by LOCAL_WORLD_SIZE where torchrun started several processes on this host.
    """
    num_cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        num_cores = len(os.sched_getaffinity(0))
    memory = available_memory_bytes(root) or UNLIMITED_BYTES
    for limit in _control_group("cpu.max", root):  # "QUOTA PERIOD": microseconds of CPU time
        quota, _, period = limit.partition(" ")
        if quota != "max":
            num_cores = min(num_cores, int(quota) // int(period))
    for limit in _control_group("memory.max", root):
        if limit != "max":
            memory = min(memory, int(limit))
    local_size = environment.get("LOCAL_WORLD_SIZE", "1")
    num_processes = max(1, int(local_size)) if local_size.isdecimal() else 1
    return Machine(max(1, num_cores // num_processes), memory // num_processes)


def available_memory_bytes(root: Path = ROOT) -> int | None:
    """Return Linux's MemAvailable; None on another system."""
    with suppress(OSError):
        for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def _control_group(name: str, root: Path) -> Iterator[str]:
    """Yield the contents of file `name` in this process's cgroup, and in every parent cgroup."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            if not line.startswith("0::"):  # a hierarchy of version 1
                continue
            group = Path(line.removeprefix("0::/"))
            for level in (group, *group.parents):
                with suppress(OSError):
                    yield (root / "sys/fs/cgroup" / level / name).read_text().strip()


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
    """Return the threads and cores of rank `local_rank` of its host.

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
    # Threads: the setting, then the user's variable, then a fair share of the cores.
    is_default = environment.get("OMP_NUM_THREADS") == "1" and "TORCHELASTIC_RUN_ID" in environment
    is_set = "OMP_NUM_THREADS" in environment and not is_default
    if threads is None and computes_on_cpu and not is_set:
        threads = max(1, num_cores // num_processes)
    # Cores: adjacent ones for each rank.
    binds = (computes_on_cpu and num_processes > 1) if bind is None else bind
    cores = sorted(allowed_cores)
    # Fewer allowed than exist: the launcher has bound the ranks already.
    if not binds or len(cores) < 2 * num_processes or len(cores) < num_cores:
        return CpuShare(threads)
    cores_per_rank = len(cores) // num_processes
    share_index = local_rank % num_processes
    first_core = share_index * cores_per_rank
    return CpuShare(threads, frozenset(cores[first_core : first_core + cores_per_rank]))


NCCL_TRACE = "nccl_trace_rank_"
"""Prefix of the flight-recorder files that NCCL's watchdog writes when a collective fails."""

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# Pinned allocations above this are not rounded up to a power of two: 38 GB take 38, not 64.
_PINNED_ROUNDING = ("pinned_max_round_threshold_mb", "64")
_EXPANDABLE = ("expandable_segments", "True")

# Values, each with all names of its variable in torch 2.11 and later (torch/csrc/distributed/c10d,
# ProcessGroupNCCL.hpp and FlightRecorder.hpp); a value of the user is kept under any name.
_NCCL: tuple[tuple[tuple[str, ...], str], ...] = (
    # End the process when NCCL reports an error or a collective exceeds the group's timeout,
    # without aborting communicators first, which may itself hang. torch's own default.
    (("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"), "3"),
    # The flight recorder: the last 2,000 collectives.
    (("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"), "2000"),
    (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"),
)
_TRACE_FILE = ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE")


def nccl_defaults(environment: Mapping[str, str], directory: Path) -> dict[str, str]:
    """Return variables to add for NCCL's error handling and flight recorder, which writes into the
    run's `directory`."""
    variables = (*_NCCL, (_TRACE_FILE, str(directory.absolute() / NCCL_TRACE)))
    return {
        names[0]: value
        for names, value in variables
        if not any(name in environment for name in names)
    }


def allocator_settings(environment: Mapping[str, str]) -> list[str]:
    """Return settings strings for torch's CUDA allocator, best first; they include the user's
    settings.

    Later strings have fewer keys, for a torch that lacks a key. Empty if the user has set all keys,
    or uses another allocator (``backend:cudaMallocAsync``), which does not have these keys.
    """
    user_settings = next(
        (environment[name] for name in _ALLOCATOR_VARIABLES if environment.get(name)), ""
    )
    user_keys = {part.partition(":")[0].strip() for part in user_settings.split(",")}
    if "backend:cudamallocasync" in user_settings.replace(" ", "").lower():
        return []
    settings = (_EXPANDABLE, _PINNED_ROUNDING)
    added = [f"{key}:{value}" for key, value in settings if key not in user_keys]
    # Setting the string replaces all settings, so the user's settings are repeated.
    repeated = [user_settings] if user_settings else []
    return [",".join([*repeated, *added[:number]]) for number in range(len(added), 0, -1)]


def triton_problem() -> str:
    """Return why Triton cannot build kernels on this host; empty if nothing is missing. It compiles
    the launcher of each kernel with a C compiler and Python's headers, which slim images lack
    (triton/runtime/build.py, 3.9)."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    compiler = os.environ.get("CC")
    if compiler is not None and shutil.which(compiler) is None:
        return f"Triton needs a C compiler, and CC = {compiler!r} is none"
    if compiler is None and not any(map(shutil.which, ("gcc", "clang"))):
        return "Triton needs a C compiler, and there is neither gcc nor clang"
    # Debian's own scheme names a folder that has no headers.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_path("include", scheme), "Python.h")
    if not header.is_file():
        return f"Triton needs Python's headers, and {header} is missing (Debian: python3-dev)"
    return ""


PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "numpy", "bitsandbytes")


def library_versions() -> dict[str, str | None]:
    """Return the versions of Python, bigtrain, `PACKAGES` and Triton by name; None if not
    installed. If Triton cannot compile on this host, the reason instead of its version, since
    layers are compiled on all hosts or on none."""
    triton = version_of("triton")
    if triton is not None:
        triton = triton_problem() or triton
    return {
        "Python": platform.python_version(),
        "bigtrain": bigtrain.__version__,
        **{name: version_of(name) for name in PACKAGES},
        "triton": triton,
    }


VERSIONS_REMEDY = "install the versions of constraints.txt there, or share one .venv"


def other_versions(
    versions_by_host: Mapping[str, Mapping[str, str | None]],
) -> dict[str, dict[str, str]]:
    """Return the versions of each host that differ from those of most hosts: texts by name."""
    names = next(iter(versions_by_host.values()))
    usual: dict[str, str | None] = {}
    for name in names:
        counts = Counter(versions[name] for versions in versions_by_host.values())
        usual[name] = max(counts, key=counts.__getitem__)  # the first on a tie
    return {
        host: {
            name: f"{name} {version} (others: {usual[name]})"
            for name, version in versions.items()
            if version != usual[name]
        }
        for host, versions in versions_by_host.items()
    }


def version_of(package: str) -> str | None:
    """Return the installed version of `package`; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
