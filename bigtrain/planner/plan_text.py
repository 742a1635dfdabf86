"""Plan as a human-readable table of the best layouts, or all layouts as JSON. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bigtrain.planner.memory import MEMORY_ERROR
from bigtrain.planner.search import Candidate, Cluster
from bigtrain.system.units import GIB


def plan_table(candidates: Sequence[Candidate], cluster: Cluster, num_shown: int) -> str:
    """Return the first `num_shown` layouts, one per line, and memory and step time of the best by
    term."""
    # A row for each layout; text columns are aligned to the left.
    rows = [["", "layout", "GPU GiB", "host GiB", "step s", "tokens/s/GPU", "limited by"]]
    for number, candidate in enumerate(candidates[:num_shown], start=1):
        rate = candidate.tokens_per_second / cluster.num_devices
        limit_share = candidate.time.terms()[candidate.limit] / candidate.time.total
        row = [
            str(number),
            candidate.describe(),
            f"{candidate.memory.total / GIB:.1f}",
            f"{candidate.memory.host / GIB:.1f}",
            f"{candidate.time.total:.3g}",
            f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}",
            f"{candidate.limit} ({limit_share:.0%})",
        ]
        rows.append(row)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        for column in (1, 6):
            cells[column] = row[column].ljust(widths[column])
        lines.append("  ".join(cells).rstrip())

    # Layouts that are tight, and memory and time of the best layout by term.
    best = candidates[0]
    tight = [n for n, c in enumerate(candidates[:num_shown], start=1) if c.is_tight(cluster)]
    if tight:
        numbers = ", ".join(map(str, tight))
        lines += ["", f"tight, within {MEMORY_ERROR:.0%} of the usable memory: {numbers}"]
    gib_by_term = ", ".join(
        f"{name} {size / GIB:.3g}" for name, size in best.memory.terms().items() if size > 0
    )
    seconds_by_term = ", ".join(
        f"{name} {seconds:.3g} s" for name, seconds in best.time.terms().items()
    )
    lines += [
        "",
        f"memory of 1, GiB of {cluster.usable_memory / GIB:.1f} usable, "
        f"stage {best.memory.stage}: {gib_by_term}",
        f"step of 1: {seconds_by_term}",
    ]
    if (costs := best.memory_checkpoints) is not None:
        stored = cluster.ranks_of_host * costs.directory_bytes / GIB
        lines.append(f"checkpoints in memory of 1: {stored:.3g} GiB of each host")
        lines += costs.lines(best.time.total)
    return "\n".join(lines)


def default_choice(candidates: Sequence[Candidate], cluster: Cluster) -> int:
    """Return the line (from 1) of the fastest layout that is not tight; 1 if all are."""
    roomy = (n for n, c in enumerate(candidates, start=1) if not c.is_tight(cluster))
    return next(roomy, 1)


def parameter_count(number: float) -> str:
    """Format a number of parameters: 8.03B, 2.56M, 812K."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"


def as_json(candidates: Sequence[Candidate], cluster: Cluster) -> list[dict[str, Any]]:
    """Return each layout with memory (bytes) and time (seconds) by their terms, and the costs of
    checkpoints in memory, if it has them."""
    rows = []
    for candidate in candidates:
        row = {
            "layout": asdict(candidate.layout),
            "fits": candidate.fits,
            "memory_bytes": {"total": candidate.memory.total, **candidate.memory.terms()},
            "host_memory_bytes": {"total": candidate.memory.host, **candidate.memory.host_terms()},
            "fullest_stage": candidate.memory.stage,
            "step_seconds": {"total": candidate.time.total, **candidate.time.terms()},
            "tokens_per_second": candidate.tokens_per_second,
            "tokens_per_second_per_device": candidate.tokens_per_second / cluster.num_devices,
            "limited_by": candidate.limit,
        }
        if (costs := candidate.memory_checkpoints) is not None:
            row["memory_checkpoints"] = costs.as_json(cluster.ranks_of_host)
        rows.append(row)
    return rows


def nothing_fits(candidates: Sequence[Candidate], cluster: Cluster) -> tuple[str, str]:
    """Return why no layout fits, and the nearest change that would help: (rule, fix)."""
    on_device = [c for c in candidates if c.memory.total <= cluster.usable_memory]
    if on_device:
        return _main_memory_lacks(min(on_device, key=lambda c: c.memory.host), cluster)
    best = candidates[0]
    need, has = best.memory.total, cluster.usable_memory
    name = cluster.device.name
    terms = best.memory.terms()
    largest = max(terms, key=lambda term: terms[term])
    rule = (
        f"no layout fits {cluster.num_devices} x {name}: the smallest ({best.layout.describe()}) "
        f"needs {need / GIB:.1f} GiB of {has / GIB:.1f} usable, {terms[largest] / GIB:.1f} of them "
        f"{largest}"
    )
    times = cluster.num_devices
    shrinking = terms["states"] + terms["gradients"]
    fixed = need - shrinking
    if best.layout.zero_stage == 3 and fixed < has:
        while fixed + shrinking * cluster.num_devices / times > has:
            times *= 2
        return rule, f"about {times} devices, among which ZeRO 3 divides the states"
    return rule, "a shorter batch.sequence_length, or devices with more memory"


def _main_memory_lacks(best: Candidate, cluster: Cluster) -> tuple[str, str]:
    """Explain that layouts fit the device but not the node; `best` needs the least main memory."""
    memory = best.memory
    need, has = memory.host, cluster.host_memory_per_rank
    terms = memory.host_terms()
    is_export = need == memory.host_export + memory.host_memory_checkpoints
    names = ["export"] if is_export else ["offload", "activations", "checkpoint"]
    names.append("memory checkpoints")
    parts = ", ".join(f"{name} {terms[name] / GIB:.1f}" for name in names if terms[name])
    rule = (
        f"the layout that needs the least main memory ({best.layout.describe()}) needs "
        f"{need / GIB:.1f} GiB of it per rank ({parts}), but only "
        f"{has / GIB:.1f} are available"
    )
    nodes = min(cluster.num_devices, cluster.device.devices_per_node)
    remedy = f"nodes with {need * nodes / GIB:.0f} GiB of main memory (--host-memory)"
    if memory.host_memory_checkpoints > 0 and need - memory.host_memory_checkpoints <= has:
        remedy = f"checkpoint.memory=null, or {remedy}"
    elif max(memory.host_offload + memory.host_activations, memory.host_export) <= has:
        remedy = f"checkpoint.asynchronous: false, which saves without a copy; or {remedy}"
    return rule, remedy
