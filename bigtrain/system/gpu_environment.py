"""Defaults for environment variables of NCCL and torch that the user has not set. Pure.

They take effect when the process group is created and when CUDA first allocates memory, so they
must be set before. A variable that the environment has is never changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

NCCL_TRACE = "nccl_trace_rank_"
"""Prefix of the flight-recorder files that NCCL's watchdog writes when a collective fails."""

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# Pinned allocations above this are not rounded up to a power of two: 38 GB take 38, not 64.
_PINNED_ROUNDING = ("pinned_max_round_threshold_mb", "64")
_EXPANDABLE = ("expandable_segments", "True")

# Each with the names under which torch 2.11 and later also know it (torch/csrc/distributed/c10d,
# ProcessGroupNCCL.hpp and FlightRecorder.hpp); if the user has set any of them, it is kept.
_NCCL: tuple[tuple[tuple[str, ...], str], ...] = (
    # End the process when NCCL reports an error or a collective exceeds the group's timeout,
    # without aborting communicators first, which may itself hang. torch's own default.
    (("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"), "3"),
    # The flight recorder: the last collectives, 2,000 of them.
    (("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"), "2000"),
    (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"),
)
_TRACE_FILE = ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE")


def nccl_defaults(environment: Mapping[str, str], directory: Path) -> dict[str, str]:
    """Return variables to add for NCCL's error handling and flight recorder, which writes into the
    run's `directory`."""
    wanted = (*_NCCL, (_TRACE_FILE, str(directory.absolute() / NCCL_TRACE)))
    return {
        names[0]: value for names, value in wanted if not any(name in environment for name in names)
    }


def allocator_settings(environment: Mapping[str, str]) -> list[str]:
    """Return settings strings for torch's CUDA allocator, best first; they include the user's own.

    The later ones are for a torch that lacks a key. Empty if the user has set all keys,
    or uses another allocator (``backend:cudaMallocAsync``), which has none of these keys.
    """
    own = next((environment[name] for name in _ALLOCATOR_VARIABLES if environment.get(name)), "")
    given = {part.partition(":")[0].strip() for part in own.split(",")}
    if "backend:cudamallocasync" in own.replace(" ", "").lower():
        return []
    added = [pair for pair in (_EXPANDABLE, _PINNED_ROUNDING) if pair[0] not in given]
    # Setting the string replaces all settings, so the user's own are repeated in it.
    before = [own] if own else []
    return [
        ",".join([*before, *(f"{key}:{value}" for key, value in added[:number])])
        for number in range(len(added), 0, -1)
    ]
