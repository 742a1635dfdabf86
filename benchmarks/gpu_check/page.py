"""The tables of speed in docs/benchmarks.md, written from the parts that have run."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.results import Part
from benchmarks.gpu_check.speed import SUBJECTS, Subject
from bigtrain.system.files import write_whole

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- written by benchmarks.gpu_check -->", "<!-- end of gpu_check -->"
_NAMES = {
    "default": "**bigtrain**",
    "bare": "bare PyTorch loop",
    "hf": "HF Trainer with the same DeepSpeed JSON",
    "compiled": "bigtrain, compiled layers",
    "liger": "bigtrain, Liger's layers",
    "float8": "bigtrain, compiled layers, float8",
}


def write_page(page: Path, machine: Mapping[str, Any], parts: Sequence[Part]) -> None:
    """Write the tables of `parts` on speed between the marks of `page`; nothing before the first of
    them has a result. Raises ValueError for a page without marks."""
    measured = [part for part in parts if "subject" in part.figures]
    if not measured:
        return
    text = page.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text.partition(BEGIN)[2]:
        raise ValueError(f"{page} has no {BEGIN}")
    tables = [_machine_line(machine)]
    for name, subject in SUBJECTS.items():
        own = [part for part in parts if part.part.startswith(f"speed-{name}-")]
        if any("subject" in part.figures for part in own):
            tables.append(_table(name, subject, own))
    written = "\n".join(tables)
    pattern = rf"(?s)({re.escape(BEGIN)}\n).*?({re.escape(END)})"
    text = re.sub(pattern, lambda match: match[1] + written + match[2], text)
    write_whole(page, text.encode())


def _machine_line(machine: Mapping[str, Any]) -> str:
    commit = machine.get("commit") or "not known"
    versions = ", ".join(
        f"{name} {machine[name]}"
        for name in ("torch", "deepspeed", "transformers")
        if name in machine
    )
    return (
        f"On one {machine.get('gpu', 'GPU')}, {machine['date']}, commit {commit}, {versions}. "
        "Each row is a part of the command below its table.\n"
    )


def _table(name: str, subject: Subject, parts: Sequence[Part]) -> str:
    """Return the table of a subject: what has run, what others published, and the command."""
    lines = [f"{subject.title}:", ""]
    lines.append("| | tokens/s | TFLOP/s | utilization | peak | tokens/s of the bare loop's |")
    lines.append("|---|---|---|---|---|---|")
    rates = {part.figures.get("contender"): part.figures.get("tokens_per_s") for part in parts}
    for part in parts:
        row_name = _NAMES[part.part.removeprefix(f"speed-{name}-")]
        if "subject" not in part.figures:
            lines.append(f"| {row_name} | {part.status}: {_one_line(part.reason)} | | | | |")
            continue
        figures, base = part.figures, rates.get("bare")
        ratio = "" if not base else f"{figures['tokens_per_s'] / base:.2f} x"
        cells = [
            f"{figures['tokens_per_s']:,.0f}",
            _cell(figures["tflops"], "{:.0f}"),
            _cell(figures["mfu"], "{:.1%}"),
            _cell(figures["peak_gib"], "{:.1f} GiB"),
            ratio,
        ]
        lines.append(f"| {row_name} | {' | '.join(cells)} |")
    if subject.published:
        tokens = _cell(subject.published.get("tokens_per_s"), "{:,.0f}")
        tflops = _cell(subject.published.get("tflops"), "{:.0f}")
        lines.append(f"| published: {subject.source} | {tokens} | {tflops} | | | |")
    names = " ".join(part.part for part in parts)
    command = f"python -m benchmarks.gpu_check --output checked --only machine {names}"
    return "\n".join([*lines, "", "```sh", command, "```", "", ""])


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _one_line(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")[:120]


def commit_of(root: Path) -> str | None:
    """Return the commit of the checkout in `root`: git's, in a copy without history that
    `make gpu-wheels` noted, or None."""
    command = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        noted = root / ".gpu-wheels" / "commit.txt"
        return noted.read_text().strip() or None if noted.is_file() else None
    return found.stdout.strip() or None
