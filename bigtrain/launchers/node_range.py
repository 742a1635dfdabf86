"""Range of node counts that a run may get, and divisibility of its batch on each. Pure.

A launcher may give a run another number of nodes at each start. The global batch stays the same and
accumulation is recomputed, so the batch must be divisible for every node count of the range.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bigtrain.errors import ConfigError, Problem
from bigtrain.settings.degrees import Degrees
from bigtrain.settings.loading import load_run_config
from bigtrain.settings.resolve import resolve_run_files
from bigtrain.system.shipped_files import checkout

_NODES = re.compile(r"(?P<fewest>[1-9][0-9]*)(?:-(?P<most>[1-9][0-9]*))?")
# The smallest batch that is divisible for all node counts of a wide range may be impractically
# large.
_MOST_GROWTH = 4


def node_range(text: str) -> tuple[int, int]:
    """Return the fewest and most nodes, from "4" or "1-4". Raises ConfigError."""
    match = _NODES.fullmatch(text)
    if match is not None:
        fewest = int(match["fewest"])
        most = int(match["most"] or fewest)
        if fewest <= most:
            return fewest, most
    rule, remedy = "is not a number of nodes", "write 4, or 1-4 for as many as are available"
    raise ConfigError(Problem("--nodes", text, rule, remedy))


@dataclass(frozen=True, kw_only=True)
class NodesRequest:
    """Run on a number of nodes that may change, as input of every launcher's script.

    `nodes` is a number or a range ("1-4"); `processes_per_node`: ranks of a node, with a GPU each
    unless `gpus` is False; `directory`: base of the run's relative paths; `setup`:
    shell lines to run first at each start.
    """

    config: str
    overrides: tuple[str, ...]
    nodes: str
    processes_per_node: int
    directory: str
    deepspeed_config: str | None = None
    gpus: bool = True
    setup: tuple[str, ...] = ()

    def arguments(self) -> list[str]:
        """Return the arguments after ``train.py --config``."""
        arguments = [self.config]
        if self.deepspeed_config is not None:
            arguments += ["--deepspeed_config", self.deepspeed_config]
        return [*arguments, *self.overrides]

    def check(self, problems: Sequence[Problem], source: str) -> None:
        """Raise ConfigError with `problems` of `source` and paths that a script cannot have in a
        line; without such problems, with the problems of the run."""
        values = {"--config": self.config, "--deepspeed_config": self.deepspeed_config or ""}
        values["the working directory"] = self.directory
        values["the checkout"] = str(checkout())
        problems = [*problems, *check_lines(values)]
        try:
            node_range(self.nodes)
        except ConfigError as error:
            problems = [*error.problems, *problems]
        if problems:
            raise ConfigError(problems, source)
        check_on_every_number(self)


def check_lines(values: Mapping[str, str]) -> list[Problem]:
    """Return problems of values that are written into one line of a script, like a header or a
    comment: the text after a line break would be a command."""
    problems = []
    for key, value in values.items():
        character = control_character(value)
        if character is not None:
            rule = f"has the control character {character}, and is in one line of the script"
            problems.append(Problem(key, value, rule, "rename it"))
    return problems


def check_spares(spares: int | None) -> list[Problem]:
    """Return the problem of a negative number of spares."""
    if spares is None or spares >= 0:
        return []
    return [Problem("--spares", spares, "is negative", "--spares 0")]


_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")


def control_character(text: str) -> str | None:
    """Return the first character of `text` that ends a line or controls a terminal, in Python's
    notation; None without one."""
    match = _CONTROL.search(text)
    return None if match is None else repr(match[0])


def check_on_every_number(request: NodesRequest) -> None:
    """Resolve the run for each number of nodes that `request` allows.

    Raises ConfigError with the problems of the smallest number that has any; if other numbers
    can run, also with these numbers and the nearest batch that is divisible for all.
    """
    config, overrides = request.config, request.overrides
    nodes, processes_per_node = request.nodes, request.processes_per_node
    smallest, largest = node_range(nodes)
    failures: dict[int, ConfigError] = {}
    for number in range(smallest, largest + 1):
        try:
            resolve_run_files(
                config,
                overrides,
                number * processes_per_node,
                request.deepspeed_config,
                "cuda" if request.gpus else "cpu",
            )
        except ConfigError as error:
            failures[number] = error
    if not failures:
        return
    # Report the smallest number that cannot run, and what would let all numbers run.
    number = min(failures)
    first = failures[number]
    problems = list(first.problems)
    runnable = [n for n in range(smallest, largest + 1) if n not in failures]
    if runnable:
        rule = (
            f"the batch is divisible for {_listed(runnable)} nodes, not for {_listed([*failures])}"
        )
        remedy = _batch_for_all(config, overrides, smallest, largest, processes_per_node)
        # Or the first range of numbers that can run: up to the next number that cannot.
        last = min((n - 1 for n in failures if n > runnable[0]), default=largest)
        fewer = f"--nodes {runnable[0]}" + (f"-{last}" if last > runnable[0] else "")
        remedy = f"{remedy}, or {fewer}" if remedy else fewer
        problems.append(Problem("--nodes", nodes, rule, remedy))
    source = f"{number} nodes x {processes_per_node} processes"
    source = f"{first.source}, on {source}" if first.source else source
    raise ConfigError(problems, source) from first


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")


def _batch_for_all(
    config: str, overrides: Sequence[str], smallest: int, largest: int, processes_per_node: int
) -> str | None:
    """Return a remedy that names the nearest global batch divisible for every number of nodes; None
    if it is over `_MOST_GROWTH` times the run's, or if no batch fits the degrees."""
    run = load_run_config(config, overrides)
    degrees = run.parallel.degrees
    worlds = [n * processes_per_node for n in range(smallest, largest + 1)]
    if any(world % degrees.replica_size for world in worlds):
        return None
    layouts = [Degrees.of_world(world, degrees) for world in worlds]
    # Experts divide the ranks over which ZeRO partitions.
    if any(layout.partition_size % degrees.expert_size for layout in layouts):
        return None
    divisor = run.batch.micro_batch_size * math.lcm(*(layout.data_size for layout in layouts))
    samples = run.batch.samples_per_step
    nearest = max(1, round(samples / divisor)) * divisor
    if nearest > _MOST_GROWTH * samples:
        return None
    if run.batch.global_tokens is not None:
        return f"batch.global_tokens: {nearest * run.batch.sequence_length} is divisible for all"
    return f"batch.global_batch_size: {nearest} is divisible for all"
