"""The page docs/reference/convert.md: keys of other trainers, and their settings here."""

from __future__ import annotations

from bigtrain.settings.conversion.convert import TRAINERS
from bigtrain.settings.conversion.trainer import TABLE as TRAINER_TABLE
from tools.markdown import markdown_cell

_HEAD = """\
`bigtrain convert` reads these keys ([how to](../howto/convert.md)). A key *without counterpart*
does not change the mathematics, and is listed when the file is converted. A key that is *refused*,
or has another value than *only* the listed ones, changes the mathematics: `--omit KEY` does without
it. A key that is not here is refused too.
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
        rows = [
            f"| `{key}` | {markdown_cell(row.describe())} |"
            for key, row in sorted(trainer.table.items())
            if not (is_shared and TRAINER_TABLE.get(key) == row)
        ]
        parts.append("| key | here |\n|---|---|\n" + "\n".join(rows) + "\n")
    return "# Keys of other trainers\n\n" + "\n".join(parts)
