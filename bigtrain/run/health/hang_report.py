"""Diagnosis of a hung run from the positions of all ranks: the rank it waits for. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Position:
    """Position of one rank.

    step: from 1; 0 before the first. collective: the collective it waits in, or None.
    """

    rank: int
    host: str
    pid: int
    step: int
    phase: str
    module: str | None
    collective: str | None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Position:
        return cls(**json.loads(text))

    @property
    def place(self) -> str:
        """Step, phase and layer, as text."""
        layer = f", {self.module}" if self.module else ""
        return f"step {self.step}, {self.phase}{layer}"

    def __str__(self) -> str:
        waits = f"in {self.collective}" if self.collective else "outside of collectives"
        return f"rank {self.rank} on {self.host} (process {self.pid}): {self.place}, {waits}"


@dataclass(frozen=True)
class Diagnosis:
    """Result of a diagnosis. ranks: lagging ranks, lowest first; empty if none differs. text:
    readable, the lagging ranks first."""

    ranks: tuple[int, ...]
    text: str


def diagnose(
    answers: Mapping[int, Position], last_known: Mapping[int, Position], hosts: Sequence[str]
) -> Diagnosis:
    """Return the lagging ranks of a world whose rank `r` runs on ``hosts[r]``.

    Parameters: `answers`, positions of the ranks that still respond; `last_known`, the last
    position that each rank reported before, by rank.

    In order: unresponsive ranks (dead, stopped, disconnected, or stuck in C code); ranks outside of
    collectives while others wait in one; those in an earlier step; those in another collective than
    most.
    """
    silent = [rank for rank in range(len(hosts)) if rank not in answers]
    if silent:
        lines = [
            f"rank {rank} on {hosts[rank]} does not respond: "
            + (f"it was last in {last_known[rank].place}" if rank in last_known else "never did")
            for rank in silent
        ]
        return _diagnosis(silent, lines, answers)
    lagging, why = _laggards(list(answers.values()))
    lines = [f"{answers[rank]} ({why})" for rank in lagging]
    if not lines:
        lines = ["all ranks are at the same position: check the network and the stacks"]
    return _diagnosis(lagging, lines, answers)


def diagnose_alone(position: Position, hosts: Sequence[str]) -> Diagnosis:
    """Return the diagnosis of a rank that cannot reach the others because the store is gone."""
    if len(hosts) == 1:
        return diagnose({position.rank: position}, {}, hosts)
    if position.rank == 0:
        line = "the launcher's store does not respond, so rank 0 cannot reach the other ranks"
        return _diagnosis([], [line], {0: position})
    line = f"rank 0 on {hosts[0]} or its store does not respond: ranks cannot reach each other"
    return _diagnosis([0], [line], {position.rank: position})


def _laggards(positions: Sequence[Position]) -> tuple[list[int], str]:
    outside = [p.rank for p in positions if p.collective is None]
    if outside and len(outside) < len(positions):
        return outside, "the others wait for it in a collective"
    first_step = min(p.step for p in positions)
    behind = [p.rank for p in positions if p.step == first_step]
    if len(behind) < len(positions):
        return behind, "the others are in a later step"
    places = Counter((p.collective, p.phase) for p in positions).most_common()
    if len(places) > 1 and places[0][1] > places[1][1]:
        usual = places[0][0]
        others = [p.rank for p in positions if (p.collective, p.phase) != usual]
        return others, f"most are in {usual[0]}, {usual[1]}"
    if len(positions) == 1:
        return [positions[0].rank], "it makes no progress"
    return [], ""


def _diagnosis(
    ranks: Sequence[int], lines: list[str], answers: Mapping[int, Position]
) -> Diagnosis:
    others = [str(answers[rank]) for rank in sorted(answers) if rank not in ranks]
    # With thousands of ranks, the waiting ones are all alike.
    shown = others[:16] + ([f"and {len(others) - 16} more"] if len(others) > 16 else [])
    text = "\n".join(["lagging:", *(f"  {line}" for line in lines)])
    if shown:
        text += "\n" + "\n".join(["waiting:", *(f"  {line}" for line in shown)])
    return Diagnosis(tuple(sorted(ranks)), text)
