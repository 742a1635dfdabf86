"""The page docs/reference/deepspeed_keys.md: which DeepSpeed keys a run accepts."""

from __future__ import annotations

import json
from collections.abc import Iterator

from bigtrain.settings.deepspeed.accepted import REFUSED_BLOCKS, ROWS, TEST, Row
from bigtrain.settings.deepspeed.keys import key_table
from tools.markdown import markdown_cell

_HEAD = f"""\
`bigtrain check` and every run accept these keys of a DeepSpeed JSON with these values; all others
are refused with the reason. **trained**: `{TEST}` starts from trained weights with it,
saves, resumes on another topology and exports, and is equal to plain PyTorch; the column names the
engines of that test, and the values that each is trained with (those of several keys at once in
parentheses). With bfloat16, offloading, expert, pipeline and sequence parallelism it trains as many
of them at once as the run accepts. **owned**: the run sets it, and another value is refused.
**untested**: no test has trained with it, and the run logs that once. In the blocks of DeepSpeed
a key may also have its field name (`max_live_parameters` is `stage3_max_live_parameters`).

| key | values | proof | trained with | note |
|---|---|---|---|---|
"""


def deepspeed_keys_page() -> str:
    """Return the page, without the line that names its source."""
    rows = "\n".join(map(_row, sorted(ROWS, key=lambda row: row.key)))
    refused = "\n".join(_refused())
    tail = f"## Refused\n\n| key | reason | fix |\n|---|---|---|\n{refused}\n"
    return f"# DeepSpeed keys\n\n{_HEAD}{rows}\n\n{tail}"


def _row(row: Row) -> str:
    values = [json.dumps(value) for value in row.examples]
    values += [f"({json.dumps(value)})" for value in row.together]
    tested = f"{', '.join(row.engines)}: {', '.join(values)}" if row.engines else ""
    if row.beside:
        tested += f", with `{json.dumps(dict(row.beside))}`"
    cells = (f"`{row.key}`", row.values, row.verdict, tested, row.note)
    return f"| {' | '.join(map(markdown_cell, cells))} |"


def _refused() -> Iterator[str]:
    for key, (reason, remedy) in sorted(REFUSED_BLOCKS.items()):
        yield f"| `{key}` | {markdown_cell(reason)} | {markdown_cell(remedy)} |"
    for key, message in key_table()["removed"].items():
        yield f"| `{key}` | removed from DeepSpeed: {markdown_cell(message)} | take it out |"
