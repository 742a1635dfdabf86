"""Write docs/compatibility.md: every compatibility rule, and every known trap of DeepSpeed.

python tools/compatibility.py --output docs/compatibility.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from bigtrain.settings.compatibility.check import RULES  # noqa: E402
from bigtrain.settings.compatibility.facts import Facts  # noqa: E402
from bigtrain.settings.compatibility.rule import Rule  # noqa: E402
from tools.compatibility_traps import TRAPS, Trap  # noqa: E402

__all__ = ["TRAPS", "page"]

_HEAD = """\
# What cannot run

Written by `python tools/compatibility.py --output docs/compatibility.md` from
`bigtrain/settings/compatibility/` and `tools/compatibility_traps/`. Every run refuses these
combinations before there is a process group, and `bigtrain check` those that it can know: of a
device with `--device` only, never a missing libaio, and the heads that tensor-parallel ranks divide
as transformers' plan for the model's type has them, without the defaults of key-value heads.
Each has a test made from its example
(`tests/unit/settings/compatibility/test_compatibility.py`). A leading `ds:` is
a key of the DeepSpeed JSON, any other of the run. The last column is what the rule itself
changes of the example; an error names other ways too.

| rule | key | reason | example | nearest that runs |
|---|---|---|---|---|
"""

_FOUND = """
## What only the model tells

Found on proxy models of the run's own model before there is a process group, and refused with the
same kind of error: an architecture without a tensor-parallel plan or with a wrong one
(`models/equivalence/tensor_parallel.py`), one that cannot be split into stages
(`models/equivalence/pipeline_stages.py`; [architectures.md](architectures.md) for both), one that
mixes tokens outside attention or whose attention does not divide
(`models/equivalence/sequence_parallel.py`), one that does not keep documents apart
(`models/equivalence/document_isolation.py`).

## Known traps of DeepSpeed 0.19.8

Features that it does not support, hangs on or computes wrongly without an error, and their
handling here.

| | what DeepSpeed does | what bigtrain does | where | test |
|---|---|---|---|---|
"""


def page() -> str:
    """Return the text of docs/compatibility.md."""
    rules = "\n".join(_row(name, rule) for name, rule in RULES.items())
    traps = "\n".join(_trap(trap) for trap in TRAPS)
    return f"{_HEAD}{rules}\n{_FOUND}{traps}\n"


def _row(name: str, rule: Rule) -> str:
    example = rule.violation()
    nearest = rule.nearest(example)
    # Also the defaults that the last column changes.
    facts = dict(_differences(Facts(), example)) | dict(_differences(nearest, example))
    said = [f"`{name}={value!r}`" for name, value in facts.items()]
    instead = [f"`{name}={value!r}`" for name, value in _differences(example, nearest)]
    cells = (
        name,
        f"`{rule.features[0].fact.key}`",
        rule.problem(example).rule,
        ", ".join(said),
        ", ".join(instead),
    )
    return f"| {' | '.join(cells)} |"


def _differences(before: Facts, after: Facts) -> Iterator[tuple[str, object]]:
    for name, value in after.values().items():
        if getattr(before, name) != value:
            yield name, value


def _trap(trap: Trap) -> str:
    where = [
        *(f"rule: {name}" for name in trap.rules),
        *(f"refused: `{key}`" for key in trap.refused),
        *(f"`{place}`" for place in trap.code),
    ]
    tests = "<br>".join(f"`{test}`" for test in trap.tests)
    return f"| {trap.area} | {trap.text} | {trap.note} | {'<br>'.join(where)} | {tests} |"


def main() -> int:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="file to write the page to")
    arguments = parser.parse_args()
    if arguments.output is None:
        print(page(), end="")
    else:
        arguments.output.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
