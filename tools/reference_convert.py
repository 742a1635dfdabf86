"""The page docs/reference/convert.md: keys of other trainers, and their settings here."""

from __future__ import annotations

from bigtrain.settings.conversion.convert import TRAINERS
from bigtrain.settings.conversion.tables import Table
from bigtrain.settings.conversion.trainer_keys import TRAINER_TABLE
from tools.markdown import markdown_cell

_HEAD = """\
`bigtrain convert` reads these keys ([how to](../howto/convert.md)). A key *without counterpart*
does not change the mathematics, and is listed when the file is converted. A key that is *refused*,
or has another value than *only* the listed ones, changes the mathematics: `--omit KEY` does without
it. A key that is not here is refused too. `datasets.type` is the key `type` of an entry of
`datasets`, which `--omit` names with its number, from 0: `datasets.0.type`.
"""


def convert_page() -> str:
    """Return the page, without the line that names its source."""
    parts = [_HEAD]
    for trainer in TRAINERS.values():
        # LLaMA-Factory's files have all keys of HF Trainer.
        is_shared = (
            trainer.table is not TRAINER_TABLE and trainer.table.keys() >= TRAINER_TABLE.keys()
        )
        parts.append(f"## {trainer.name}\n")
        if is_shared:
            parts.append("The keys of [HF Trainer and TRL](#hf-trainer-and-trl), and:\n")
        table = {
            key: row
            for key, row in trainer.table.items()
            if not (is_shared and TRAINER_TABLE.get(key) == row)
        }
        rows = [
            f"| `{key}` | {markdown_cell(text)} |" for key, text in sorted(_cells(table).items())
        ]
        parts.append("| key | here |\n|---|---|\n" + "\n".join(rows) + "\n")
    return "# Keys of other trainers\n\n" + "\n".join(parts)


def _cells(table: Table, prefix: str = "") -> dict[str, str]:
    """Return the cell of each key of a table, also of the keys within keys. Keys that several keys
    have within them are listed once."""
    cells: dict[str, str] = {}
    listed: list[tuple[str, Table]] = []
    for name, row in table.items():
        key = f"{prefix}{name}"
        same = [other for other, members in listed if members == row.members]
        cells[key] = row.describe() + (f"; its keys are those of `{same[0]}`" if same else "")
        if row.members and not same:
            listed.append((key, row.members))
            cells.update(_cells(row.members, f"{key}."))
    return cells
