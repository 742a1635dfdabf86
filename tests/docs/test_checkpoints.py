"""The page on checkpoints: what it says that checkpoints in memory cost is what a plan says."""

from __future__ import annotations

import re
import shlex

import pytest

from bigtrain.errors import ConfigError
from bigtrain.python_api.planning import plan
from tests.support.pages import page_blocks, page_text

PAGE = page_text("docs/checkpoints.md")
TOLD = [line for line in PAGE.splitlines() if re.match(r"\| llama3_\w+ \|", line)]


def row(name: str, number: int) -> str:
    """The row of the table for a recipe on so many GPUs."""
    [typed] = [line for block in page_blocks(PAGE) for line in block.splitlines() if "plan" in line]
    words = shlex.split(typed)
    overrides = [word for word in words if word.startswith(("checkpoint.", "data."))]
    cells = [name, f"{number:,}"]
    try:
        best = plan(name, f"{number}xH100-80GB", *overrides, host_memory_bytes=2e12).fitting[0]
    except ConfigError:
        return f"| {' | '.join([*cells, 'does not fit', *['-'] * 4])} |"
    costs = best.memory_checkpoints
    assert costs is not None
    [*_, last] = costs.lines(best.time.total)
    needed = re.search(r"every_steps=(\d+)", last)
    cells += [
        f"{min(number, 8) * costs.directory_bytes / 2**30:.3g} GiB",
        f"{costs.blocked_seconds:.2g} s",
        f"{costs.sent_bytes / 2**30:.3g} GiB" if costs.sent_bytes else "no partner",
        f"{costs.writing_seconds:.2g} s",
        needed[1] if needed else "1",
    ]
    return f"| {' | '.join(cells)} |"


def test_costs_of_the_table() -> None:
    assert [re.findall(r"[\w,]+", line)[:2] for line in TOLD] == [
        [name, number]
        for name in ("llama3_8b", "llama3_70b")
        for number in ("8", "64", "512", "1,024")
    ]
    assert row("llama3_8b", 64) == TOLD[1]


@pytest.mark.slow
@pytest.mark.parametrize("told", [TOLD[0], TOLD[-1]], ids=["without a partner", "longest"])
def test_other_costs_of_the_table(told: str) -> None:
    name, number = (cell.strip() for cell in told.split("|")[1:3])
    assert row(name, int(number.replace(",", ""))) == told
