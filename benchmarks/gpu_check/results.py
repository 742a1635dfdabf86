"""Result of a part: passed, failed or skipped, duration, and measurements."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from bigtrain.system.files import write_whole

Status = Literal["passed", "failed", "skipped"]
Start = Literal["fork", "fresh"]


@dataclass(frozen=True)
class Setup:
    """Device, size and directory of a part.

    device: cuda or cpu. tiny: sizes for tests. directory: of this part only, empty. seconds: the
    time limit; a part with several measurements skips the rest when it is exceeded.
    start: how processes are started (`processes.py`).
    """

    device: Literal["cuda", "cpu"]
    tiny: bool
    directory: Path
    seconds: float
    start: Start = "fork"

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"


@dataclass
class Part:
    """One part's result; `figures` are JSON, keys carry units; `reason`: of anything but passed."""

    part: str
    status: Status = "passed"
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    reason: str = ""

    def fail(self, reason: str) -> None:
        """Record a failure; the first one's reason comes first."""
        self.reason = f"{self.reason}; {reason}" if self.status == "failed" else reason
        self.status = "failed"

    def skip(self, reason: str) -> None:
        """Say why nothing of the part could run."""
        if self.status == "passed":
            self.status, self.reason = "skipped", reason

    def check(self, condition: bool, reason: str) -> None:
        """Fail with `reason` unless `condition`."""
        if not condition:
            self.fail(reason)

    def note(self, name: str, text: str) -> None:
        """Note a call of the part that could not run here, by name."""
        self.figures.setdefault("skipped", {})[name] = text


Function = Callable[[Setup, Part], None]
"""A part: adds figures to its `Part`, and may fail or skip it. An exception is a failure."""


def write_results(path: Path, machine: dict[str, Any], parts: Sequence[Part]) -> None:
    """Write all results so far as JSON, replacing earlier ones."""
    tree = {"machine": machine, "parts": [asdict(part) for part in parts]}
    write_whole(path, (json.dumps(tree, indent=2, default=str) + "\n").encode())


def table(parts: Sequence[Part]) -> str:
    """Return the results as a Markdown table for docs/benchmarks.md."""
    lines = ["| Part | Result | s | Figures |", "|---|---|---|---|"]
    for part in parts:
        said = part.reason.replace("|", "/").replace("\n", " ")[:300]
        result = part.status if not said else f"{part.status}: {said}"
        lines.append(f"| {part.part} | {result} | {part.seconds:.0f} | {_figures(part.figures)} |")
    return "\n".join(lines)


def _figures(figures: dict[str, Any]) -> str:
    return "; ".join(f"{key} {_value(value)}" for key, value in figures.items() if key != "rows")


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "(" + ", ".join(f"{key} {_value(item)}" for key, item in value.items()) + ")"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value[:8])) + "]"
    return str(value).replace("|", "/").replace("\n", " ")[:120]
