"""Request to `bigtrain tokenize`, and its options for reading inputs; number of worker processes
and threads that build shards, and their order of units. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from bigtrain.data.chat.named_templates import check_control_tokens
from bigtrain.data.documents.chat_formats import FORMATS
from bigtrain.data.documents.files import Selection
from bigtrain.data.documents.reader import ReadOptions
from bigtrain.data.documents.text_filter import TextFilter
from bigtrain.data.shards.manifest import WORK_DIRECTORY, OptionsRecord
from bigtrain.data.tokenizers.chat_template import ChatTemplate
from bigtrain.data.tokenizers.equivalence import Choice
from bigtrain.data.tokenizers.tokenizer import NoChatTemplate, Tokenizer
from bigtrain.errors import LaunchError
from bigtrain.objectives.rows import Rows
from bigtrain.objectives.section import ROWS
from bigtrain.system.machine import Machine

T = TypeVar("T")
BYTES_PER_PROCESS = 256 << 20
"""Minimum input bytes per process if there are several: a process starts in half a second, and its
encoder caches words that other processes cache, too. Two processes are as fast as one for an input
of twice this size."""
MEMORY_BYTES_PER_PROCESS = 1 << 30
"""Free memory needed per process: batches, and the encoder's caches of at most half of it."""


@dataclass(frozen=True)
class Workers:
    """Worker processes: `num_processes`, each with `num_threads` threads for encoding. `started`:
    the command starts the processes; otherwise it is the only process itself."""

    num_processes: int
    num_threads: int
    started: bool = True


def divide(workers: int | None, num_units: int, num_bytes: int, machine: Machine) -> Workers:
    """Return the processes for `num_units` units of work with `num_bytes` of input in total.
    `workers` is what the user wants: 1 is one process with all cores, otherwise this number of
    threads in as many processes as there are units. None: all cores, in processes if each has
    enough work and memory. An input of unknown size (0 bytes) gets one process."""
    if workers == 1:
        return Workers(1, machine.num_cores, started=False)
    if workers is not None:
        num_processes = max(1, min(workers, num_units))
        return Workers(num_processes, workers // num_processes)  # started, even a single one
    limits = [
        machine.num_cores,
        num_units,
        num_bytes // BYTES_PER_PROCESS,
        machine.memory_bytes // MEMORY_BYTES_PER_PROCESS,
    ]
    num_processes = max(1, min(limits))
    num_threads = machine.num_cores // num_processes
    return Workers(num_processes, num_threads, started=num_processes > 1)


GOLDEN = 0.6180339887498949
"""Golden ratio: the fractional parts of its multiples are spread evenly, however many there are."""


@dataclass(frozen=True)
class WorkerRank:
    """Rank `rank` of `size` tokenizing commands or workers; a size of None is unknown."""

    rank: int = 0
    size: int | None = 1

    def split(self, part: int, parts: int) -> WorkerRank:
        """Return the share of worker `part` of this process's `parts`."""
        size = None if self.size is None else self.size * parts
        return WorkerRank(self.rank * parts + part, size)

    def order(self, items: Sequence[T]) -> list[T]:
        """Return all `items` in the order of processing: first every `size`-th item from the
        `rank`-th, then the items of the next ranks. If the size is unknown, starts are spread over
        the items by the golden ratio, which separates any number of ranks."""
        if self.size is None:
            start_fraction = (self.rank * GOLDEN) % 1.0
            first = int(start_fraction * len(items))
            return [*items[first:], *items[:first]]
        rank = self.rank % self.size
        turns = ((rank + turn) % self.size for turn in range(self.size))
        return [item for turn in turns for item in items[turn :: self.size]]


def find_worker_rank(
    environment: Mapping[str, str], rank: int | None = None, size: int | None = None
) -> WorkerRank:
    """Return the share given by `rank` and `size`, or else by the launcher's environment.

    Search order: torchrun's RANK and WORLD_SIZE, Slurm's array (SLURM_ARRAY_TASK_ID,
    _MIN, _STEP and _COUNT) and tasks (SLURM_PROCID, SLURM_NTASKS; a task of an array has
    both), and a Kubernetes indexed job's JOB_COMPLETION_INDEX, which has no size. Raises
    LaunchError for an invalid number, for a rank that is not below the size, and for half of a
    pair.
    """
    if (rank is None) != (size is None):
        raise LaunchError("--rank and --world-size must be given together -> give both or neither")
    if rank is not None and size is not None:
        return _checked(rank, size, "--rank and --world-size")

    def number(name: str, default: str | None = None) -> int:
        text = environment.get(name, default)
        try:
            return int(text or "")
        except ValueError:
            raise LaunchError(f"{name}={text} in the environment is not a number") from None

    # The launcher's variables, from the most specific.
    if {"RANK", "WORLD_SIZE"} & environment.keys():
        return _checked(number("RANK"), number("WORLD_SIZE"), "RANK and WORLD_SIZE")
    if {"SLURM_PROCID", "SLURM_ARRAY_TASK_ID"} & environment.keys():
        task_rank, num_tasks = number("SLURM_PROCID", "0"), number("SLURM_NTASKS", "1")
        if "SLURM_ARRAY_TASK_ID" not in environment:
            return _checked(task_rank, num_tasks, "SLURM_PROCID and SLURM_NTASKS")
        step = max(1, number("SLURM_ARRAY_TASK_STEP", "1"))
        array_index = (number("SLURM_ARRAY_TASK_ID") - number("SLURM_ARRAY_TASK_MIN", "0")) // step
        array_size = number("SLURM_ARRAY_TASK_COUNT")
        names = "SLURM_ARRAY_TASK_ID, _MIN, _STEP and _COUNT"
        return _checked(array_index * num_tasks + task_rank, array_size * num_tasks, names)
    if "JOB_COMPLETION_INDEX" in environment:
        return WorkerRank(number("JOB_COMPLETION_INDEX"), None)
    return WorkerRank()


def _checked(rank: int, size: int, names: str) -> WorkerRank:
    if not 0 <= rank < size:
        raise LaunchError(f"{names}: rank {rank} of {size} is not in 0..{size - 1}")
    return WorkerRank(rank, size)


@dataclass(frozen=True)
class BuildRequest:
    """Request to `bigtrain tokenize`. `workers` and `share` do not change the result.
    `chat_template`: a template file for conversations, instead of the tokenizer's template."""

    selection: Selection
    options: OptionsRecord
    tokenizer: str
    output: Path
    chat_template: Path | None
    encoder: Choice
    workers: int | None
    share: WorkerRank

    def reading(self) -> ReadOptions:
        """Return the options for reading the inputs."""
        rule = self.options.text_filter
        return ReadOptions(
            selection=self.selection,
            text_keys=self.options.text_keys,
            max_document_bytes=self.options.max_document_bytes,
            chat=self.options.chat,
            chat_format=self.options.chat_format,
            last_only=self.options.learned == "last",
            scratch=self.output / WORK_DIRECTORY,
            roles=self.options.roles,
            text_filter=None if rule is None else TextFilter(rule.name, rule.source_xxh3),
            ignored_keys=self.options.ignored_keys,
            quotes=self.options.quotes,
        )

    @property
    def rows(self) -> Rows | None:
        """Kind of rows that the dataset holds, if these are more than documents."""
        rows = ROWS.get(self.options.chat_format) if self.options.chat else None
        return None if rows is None else rows.name

    def find_template(self, tokenizer: Tokenizer) -> ChatTemplate | None:
        """Return the chat template for its conversations; None without conversations, or if no
        template is needed and the tokenizer has none. Raises DataError as
        `Tokenizer.chat_template`."""
        if not self.options.chat or self.options.chat_format == "tokens":
            return None
        try:
            if self.chat_template is not None:
                check_control_tokens(self.chat_template, tokenizer)
            return tokenizer.chat_template(self.chat_template)
        except NoChatTemplate:
            if FORMATS[self.options.chat_format].needs_template:
                raise
            return None
