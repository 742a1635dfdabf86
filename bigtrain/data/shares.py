"""With which units a process begins: its place among others that were started beside it. Pure.

Nothing depends on it but how often two processes want the same unit: each takes over what others
leave, so a wrong number costs nothing, and a process that never starts is not missed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from bigtrain.errors import LaunchError

T = TypeVar("T")
GOLDEN = 0.6180339887498949


@dataclass(frozen=True)
class Share:
    """Process `rank` of `size`; a size of None is one that nobody told."""

    rank: int = 0
    size: int | None = 1

    def split(self, part: int, parts: int) -> Share:
        """The share of worker `part` of this process's `parts`."""
        size = None if self.size is None else self.size * parts
        return Share(self.rank * parts + part, size)

    def order(self, items: Sequence[T]) -> list[T]:
        """All `items`, in the order in which to try them: the own ones, then the others'.

        Own are every `size`-th from the `rank`-th. Where the size is not known, the begin is spread
        over the items by the golden ratio, which keeps any number of ranks apart.
        """
        if self.size is None:
            first = int(self.rank * GOLDEN % 1.0 * len(items))
            return [*items[first:], *items[:first]]
        rank = self.rank % self.size
        turns = ((rank + turn) % self.size for turn in range(self.size))
        return [item for turn in turns for item in items[turn :: self.size]]


def find_share(
    environment: Mapping[str, str], rank: int | None = None, size: int | None = None
) -> Share:
    """The share given by `rank` and `size`, or else by the launcher's environment.

    Looked for in this order: torchrun's RANK and WORLD_SIZE, Slurm's array (SLURM_ARRAY_TASK_ID,
    _MIN, _STEP and _COUNT) and tasks (SLURM_PROCID, SLURM_NTASKS), of which each task of an array
    has both, and a Kubernetes indexed job's JOB_COMPLETION_INDEX, which knows no size. Raises
    LaunchError for what is no number, for a rank outside of its size, and for half of a pair.
    """
    if (rank is None) != (size is None):
        raise LaunchError("--rank and --world-size go together: give both or none")
    if rank is not None and size is not None:
        return _checked(rank, size, "--rank and --world-size")

    def number(name: str, default: str | None = None) -> int:
        text = environment.get(name, default)
        try:
            return int(text or "")
        except ValueError:
            raise LaunchError(f"{name}={text} in the environment is no number") from None

    if {"RANK", "WORLD_SIZE"} & environment.keys():
        return _checked(number("RANK"), number("WORLD_SIZE"), "RANK and WORLD_SIZE")
    if {"SLURM_PROCID", "SLURM_ARRAY_TASK_ID"} & environment.keys():
        task, num_tasks = number("SLURM_PROCID", "0"), number("SLURM_NTASKS", "1")
        if "SLURM_ARRAY_TASK_ID" not in environment:
            return _checked(task, num_tasks, "SLURM_PROCID and SLURM_NTASKS")
        step = max(1, number("SLURM_ARRAY_TASK_STEP", "1"))
        index = (number("SLURM_ARRAY_TASK_ID") - number("SLURM_ARRAY_TASK_MIN", "0")) // step
        count = number("SLURM_ARRAY_TASK_COUNT")
        names = "SLURM_ARRAY_TASK_ID, _MIN, _STEP and _COUNT"
        return _checked(index * num_tasks + task, count * num_tasks, names)
    if "JOB_COMPLETION_INDEX" in environment:
        return Share(number("JOB_COMPLETION_INDEX"), None)
    return Share()


def _checked(rank: int, size: int, names: str) -> Share:
    if not 0 <= rank < size:
        raise LaunchError(f"{names}: rank {rank} of {size} is not in 0..{size - 1}")
    return Share(rank, size)
