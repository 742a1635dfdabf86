"""Try every causal LM of transformers under every kind of parallelism: docs/architectures.md.

    python tools/architectures.py [--output docs/architectures.md]
    python tools/architectures.py --only llama,gpt2 --output docs/architectures.md
    python tools/architectures.py --only llama,gpt2 --column "PP 2"

*exact*: tiny models compute what the plain model of transformers does in one process. With isolated
documents (documents): the loss and every gradient of documents in samples of their own. In 2 and in
4 stages (PP), recomputing layers: the same logits to the last bit and every gradient. Split over 2
processes (TP), over 2 processes and into 2 stages (TP x PP), with samples split over 2 processes
(SP), or with experts divided over 2 processes that have a sample each (EP), without and in 2
stages: the same losses of three AdamW steps and all weights after them. *refused*: `bigtrain`
refuses the run, with the reason. *wrong*: the numbers differ, or a process ends or hangs, without a
refusal; there must be none, and the exit code is 1 if there is one.

Outcomes are kept in the cache (`bigtrain.system.user_cache`) until a tiny configuration,
transformers, torch or the tested code changes; so an interrupted sweep continues. With `--output`
they are recorded in tools/architecture_outcomes.json, from which the page is written: with `--only`
the recorded outcomes of other model types stay, if they are of the same versions.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from bigtrain.system.local_world import free_port  # noqa: E402
from bigtrain.system.user_cache import cache_get, key_of, package_fingerprints, source_of  # noqa: E402

COLUMNS = ("documents", "PP 2", "PP 4", "TP 2", "TP 2 x PP 2", "SP 2", "EP 2", "EP 2 x PP 2")
RECORD = ROOT / "tools" / "architecture_outcomes.json"
"""Versions, and outcomes by model type and column, from which the page follows."""
WORKER = ROOT / "tools" / "architecture_trials.py"
PARTS = [WORKER.with_name(name) for name in ("expert_trials.py", "trial_training.py")]
HANGS_AFTER_SECONDS = 300.0
"""Of one architecture's trial without a new one beginning; the longest takes a tenth of that."""

Outcomes = dict[str, dict[str, tuple[str, str]]]
"""By model type and column."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", metavar="TYPE,...", help="model types (default: all)")
    parser.add_argument("--column", choices=COLUMNS, help="default: all")
    parser.add_argument("--output", type=Path, help="Markdown page (default: not written)")
    parser.add_argument("--record", type=Path, default=RECORD, help="outcomes of --output")
    args = parser.parse_args()
    if args.output and args.column:
        parser.error("--output writes all columns: omit --column")
    recorded: Outcomes = {}
    if args.output and args.only:
        versions, recorded = read_record(args.record)
        if versions != tested_versions():
            parser.error(f"{args.record} is of {versions}: omit --only")
    # Ended from outside, it takes its processes along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    columns = (args.column,) if args.column else COLUMNS
    outcomes = sweep(args.only.split(",") if args.only else [], columns)
    for model_type, by_column in sorted(outcomes.items()):
        for column, (result, reason) in by_column.items():
            print(f"{model_type:28} {column:12} {result:8} {reason}")
    for column in columns:
        print(f"{column:12} {_counts(outcomes, column)}")
    if args.output is not None:
        write_record(args.record, {**recorded, **outcomes})
        args.output.write_text(page(args.record), encoding="utf-8")
    wrong = any(
        result == "wrong" for by_column in outcomes.values() for result, _ in by_column.values()
    )
    return 1 if wrong else 0


def sweep(model_types: Sequence[str], columns: Sequence[str] = COLUMNS) -> Outcomes:
    """Return the outcomes of architectures (none: all that there are)."""
    from tools.tiny_models import model_types as every

    keys = {name: _key(name) for name in model_types or every()}
    tasks: list[dict[str, Any]] = []
    for name, key in keys.items():
        known = cache_get("architectures", key) or {}
        missing = [column for column in columns if column not in known]
        if missing:
            tasks.append({"model_type": name, "key": key, "columns": missing})
    while tasks:
        _run_world(tasks)
        tasks = [task for task in tasks if not _is_known(task)]
    return {
        name: {c: tuple((cache_get("architectures", key) or {})[c]) for c in columns}
        for name, key in keys.items()
    }


def _key(model_type: str) -> str:
    """Return the cache key of an architecture's outcomes: all that they depend on."""
    from tools.tiny_models import describe

    tried = sorted((ROOT / "bigtrain" / "models").rglob("*.py"))
    source = source_of(*map(str, [*tried, WORKER, *PARTS]))
    return key_of(
        [model_type, describe(model_type), package_fingerprints("torch", "transformers"), source]
    )


def _is_known(task: Mapping[str, Any]) -> bool:
    known = cache_get("architectures", task["key"]) or {}
    return all(column in known for column in task["columns"])


def _run_world(tasks: Sequence[Mapping[str, Any]]) -> None:
    """Try `tasks` in two processes until all are done or one of them takes the processes down.

    The trial that ran then is wrong, and the remaining tasks need another world.
    """
    from tools.architecture_trials import PROCESSES, keep

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "tasks.json").write_text(json.dumps(tasks))
        progress = Path(folder, "progress.json")
        environment = {
            **os.environ,
            "WORLD_SIZE": str(PROCESSES),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, str(WORKER), str(Path(folder, "tasks.json")), str(progress)]
        processes = [
            subprocess.Popen(command, env={**environment, "RANK": str(rank)}, cwd=ROOT)
            for rank in range(PROCESSES)
        ]
        try:
            failure = _wait(processes, progress)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if failure and not progress.exists():
            raise SystemExit(f"before the first architecture: {failure}")
        if failure:
            name, columns = json.loads(progress.read_text())
            task = next(task for task in tasks if task["model_type"] == name)
            keep(task["key"], dict.fromkeys(columns, ("wrong", failure)))


def _wait(processes: Sequence[subprocess.Popen[bytes]], progress: Path) -> str:
    """Until all end; what went wrong, or nothing."""
    begun, seen = time.monotonic(), ""
    while any(process.poll() is None for process in processes):
        time.sleep(0.2)
        now = progress.read_text() if progress.exists() else ""
        if now != seen:
            begun, seen = time.monotonic(), now
        if time.monotonic() - begun > HANGS_AFTER_SECONDS:
            return f"it hangs for more than {HANGS_AFTER_SECONDS:.0f} s"
    codes = [process.returncode for process in processes]
    return f"its processes end with exit codes {codes}" if any(codes) else ""


def tested_versions() -> dict[str, str]:
    """Return the versions of the libraries that the outcomes depend on."""
    return {name: version(name).split("+")[0] for name in ("torch", "transformers")}


def read_record(path: Path) -> tuple[dict[str, str], Outcomes]:
    """Return the versions and the outcomes that `write_record` wrote."""
    tree = json.loads(path.read_text(encoding="utf-8"))
    outcomes = {
        name: {column: (result, reason) for column, (result, reason) in by_column.items()}
        for name, by_column in tree["outcomes"].items()
    }
    return tree["versions"], outcomes


def write_record(path: Path, outcomes: Outcomes) -> None:
    """Write a line for each model type, with short reasons."""
    rows = (
        f"{json.dumps(name)}: "
        + json.dumps({c: [result, short(reason)] for c, (result, reason) in by_column.items()})
        for name, by_column in sorted(outcomes.items())
    )
    text = f'{{"versions": {json.dumps(tested_versions())},\n"outcomes": {{\n'
    path.write_text(text + ",\n".join(rows) + "\n}}\n", encoding="utf-8")


def page(record: Path) -> str:
    """Return the outcomes in `record`, and what weight decay falls on, as a Markdown page."""
    from tools.parameter_table import FOOTER, section

    return "\n".join([*tables(record), *section(), FOOTER, ""])


def tables(record: Path) -> list[str]:
    """Return the lines of the page that follow from the outcomes in `record`."""
    versions, outcomes = read_record(record)
    notes: dict[str, int] = {}

    def cell(outcome: tuple[str, str]) -> str:
        result, reason = outcome
        if result == "exact":
            return "exact"
        return f"{result} ({notes.setdefault(short(reason), len(notes) + 1)})"

    left_out = {n: f for n, f in outcomes.items() if all(r == "left out" for r, _ in f.values())}
    rows = [
        f"| `{name}` | " + " | ".join(cell(by_column[column]) for column in COLUMNS) + " |"
        for name, by_column in sorted(outcomes.items())
        if name not in left_out
    ]
    legend = " ".join((__doc__ or "").split("\n\n")[2].split())
    return [
        "# Architectures",
        "",
        f"Tried with transformers {versions['transformers']} and torch "
        f"{versions['torch']}: {len(rows)} of the {len(outcomes)} model types of "
        f"causal LMs. {len(left_out)} are skipped; their reasons are below the table.",
        "",
        legend,
        "",
        "| | " + " | ".join(COLUMNS) + " |",
        "|---|" + "---|" * len(COLUMNS),
        *(
            f"| {result} | "
            + " | ".join(str(_counts(outcomes, column)[result]) for column in COLUMNS)
            + " |"
            for result in ("exact", "refused", "wrong")
        ),
        "",
        "| model type | " + " | ".join(COLUMNS) + " |",
        "|---|" + "---|" * len(COLUMNS),
        *rows,
        "",
        *(f"{number}. {reason}" for reason, number in notes.items()),
        "",
        "Skipped:",
        "",
        *(
            f"- `{name}`: {short(by_column['PP 2'][1])}"
            for name, by_column in sorted(left_out.items())
        ),
        "",
    ]


def statuses(text: str) -> dict[str, dict[str, str]]:
    """Parse a page that `page` wrote: exact, refused or wrong, by model type and column."""
    results_of, columns = {}, COLUMNS
    for line in text.partition("\n## ")[0].splitlines():
        if line.startswith("| model type"):
            columns = tuple(cell.strip() for cell in line.strip("|").split("|"))[1:]
        if line.startswith("| `"):
            name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            results = (cell.split(" ")[0] for cell in cells)
            results_of[name.strip("`")] = dict(zip(columns, results, strict=True))
    return results_of


def short(reason: str) -> str:
    """Return a reason without the text of every refusal, and without the fix."""
    for prefix in (" is wrong: ", " cannot be carried out: ", "is not supported for model_type "):
        reason = reason.split(prefix)[-1]
    reason = reason.split(" -> ")[0].split(" for model_type ")[0]
    return reason.replace("|", "/").replace("<", "&lt;")


def _counts(outcomes: Outcomes, column: str) -> Counter[str]:
    return Counter(by_column[column][0] for by_column in outcomes.values())


if __name__ == "__main__":
    sys.exit(main())
