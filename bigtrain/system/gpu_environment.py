"""What NVIDIA's and torch's libraries read of the environment, where the user has not set it. Pure.

All of it counts from the moment at which the process group is opened and CUDA gets its first
memory; a variable that the environment has is never changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

NCCL_TRACE = "nccl_trace_rank_"
"""Beginning of the names of the files that NCCL's watchdog writes when a collective fails."""

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# Larger pieces of page-locked memory are not rounded up to a power of two: 38 GB take 38, not 64.
_PINNED_ROUNDING = ("pinned_max_round_threshold_mb", "64")
_EXPANDABLE = ("expandable_segments", "True")

# Each with the names under which torch 2.11 and later also know it (torch/csrc/distributed/c10d,
# ProcessGroupNCCL.hpp and FlightRecorder.hpp); whichever the user has set counts.
_NCCL: tuple[tuple[tuple[str, ...], str], ...] = (
    # End the process where NCCL reports an error, or a collective takes longer than the group's
    # timeout; communicators are not aborted first, which may hang itself. torch's own default.
    (("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"), "3"),
    # The flight recorder: the last collectives, 2,000 of them.
    (("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"), "2000"),
    (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"),
)
_TRACE_FILE = ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE")


def nccl_defaults(environment: Mapping[str, str], directory: Path) -> dict[str, str]:
    """Variables to add for NCCL's error handling and flight recorder; `directory`: of the run."""
    wanted = (*_NCCL, (_TRACE_FILE, str(directory.absolute() / NCCL_TRACE)))
    return {
        names[0]: value for names, value in wanted if not any(name in environment for name in names)
    }


def allocator_settings(environment: Mapping[str, str]) -> list[str]:
    """What to give torch's allocator beside the user's own settings, the best first.

    The later ones are for a torch that does not know a key. Empty where the user has said all of
    it, or has taken another allocator (``backend:cudaMallocAsync``), which has none of this.
    """
    own = next((environment[name] for name in _ALLOCATOR_VARIABLES if environment.get(name)), "")
    given = {part.partition(":")[0].strip() for part in own.split(",")}
    if "backend:cudamallocasync" in own.replace(" ", "").lower():
        return []
    added = [pair for pair in (_EXPANDABLE, _PINNED_ROUNDING) if pair[0] not in given]
    # torch takes the string as the whole of its settings, so the user's comes first in it.
    before = [own] if own else []
    return [
        ",".join([*before, *(f"{key}:{value}" for key, value in added[:number])])
        for number in range(len(added), 0, -1)
    ]
