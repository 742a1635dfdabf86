"""Check that an addition is complete: each step of its guide in CONTRIBUTING.md, then its tests.

    python tools/guide.py metric grad_norm
    python tools/guide.py objective kto
    python tools/guide.py optimizer lion
    python tools/guide.py format .parquet
    python tools/guide.py row-format sharegpt
    python tools/guide.py option "tokenize --held-out"
    python tools/guide.py launcher OMPI_COMM_WORLD_RANK   (the variable with a process's rank)
    python tools/guide.py architecture gemma3_text
    python tools/guide.py degree sequence

Prints a line for each step and PASS or FAIL at the end, which the exit code (0 or 1) says too.
--no-tests: the steps only, seconds.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from generated_file import ROOT

FAST = ("-m", "not slow", "-q")
NAMED = ("-k", "{name}", "-q")


@dataclass(frozen=True)
class Guide:
    """How the addition of one thing is checked. steps: yields each step of the guide with whether
    it is done, for the thing's name. tests: arguments of pytest, ``{name}`` for the name."""

    steps: Callable[[str], Iterator[tuple[str, bool]]]
    tests: tuple[str, ...]


def check_metric(name: str) -> Iterator[tuple[str, bool]]:
    from bigtrain.metrics.step_metrics import StepMetrics

    row = StepMetrics.__dataclass_fields__.get(name)
    yield "a row of StepMetrics with its meaning", bool(row and row.metadata.get("meaning"))
    yield (
        "its value in bigtrain/run or bigtrain/engine",
        is_in(name, "bigtrain/run", "bigtrain/engine"),
    )
    yield "docs/reference/metrics.md (make reference)", is_in(f"`{name}`", "docs/reference")
    yield "a test that names it", is_in(name, "tests")


def check_objective(name: str) -> Iterator[tuple[str, bool]]:
    from bigtrain.objectives.section import KINDS

    kind = KINDS.get(name)
    loss = (kind.loss if kind else "").partition(":")[0].replace(".", "/")
    yield "its row in KINDS", kind is not None
    yield "bigtrain/objectives/NAME.py", (ROOT / f"bigtrain/objectives/{name}.py").exists()
    yield "its loss in bigtrain/objectives/losses", (ROOT / f"{loss}.py").exists()
    yield (
        "its equation in CASES of test_losses.py, unless it is a term of next_token's",
        is_in(f'"{name}"', "tests/unit/objectives/test_losses.py")
        or (kind is not None and kind.loss == KINDS["next_token"].loss),
    )
    yield "a test of its training in tests/parity", is_in(name, "tests/parity")
    yield "docs/howto/objectives.md", is_in(f"`{name}`", "docs/howto/objectives.md")
    yield (
        "docs/reference/configuration.md (make reference)",
        is_in(f"{name}: ", "docs/reference/configuration.md"),
    )


def check_optimizer(name: str) -> Iterator[tuple[str, bool]]:
    from bigtrain.parity.optimizers import PLAIN, PLAIN_OF_MATRICES
    from bigtrain.settings.sections.optimizer import OPTIMIZERS

    yield "a row of OPTIMIZERS", name in OPTIMIZERS
    yield "its plain version for bigtrain parity", name in PLAIN.keys() | PLAIN_OF_MATRICES.keys()
    yield (
        "a case in tests/parity/test_optimizers.py",
        is_in(name, "tests/parity/test_optimizers.py"),
    )
    yield (
        "its states on another topology",
        is_in(name, "tests/parity/test_optimizer_checkpoints.py"),
    )
    yield "its bytes in the planner's tests", is_in(name, "tests/unit/planner")
    yield "a row of docs/howto/optimizers.md", is_in(name, "docs/howto/optimizers.md")


def check_format(suffix: str) -> Iterator[tuple[str, bool]]:
    from bigtrain.data.documents.formats import BY_SUFFIX

    reader = BY_SUFFIX.get(suffix)
    yield f"a reader of {suffix} in READERS", reader is not None
    yield "the reader's docstring", bool(reader and reader.__doc__)
    yield (
        "its documents in test_discovery.py",
        is_in(suffix, "tests/unit/data/documents/test_discovery.py"),
    )
    yield (
        "its changes and units in the tests of tokenize_job",
        is_in(suffix, "tests/unit/data/tokenize_job"),
    )
    yield "docs/howto/your_data.md", is_in(suffix, "docs/howto/your_data.md")


def check_row_format(name: str) -> Iterator[tuple[str, bool]]:
    from typing import get_args

    from bigtrain.data.documents.chat_formats import FORMATS
    from bigtrain.data.documents.row_keys import ROW_KEYS
    from bigtrain.objectives.rows import RowFormat

    yield "its entry in FORMATS of chat_formats.py", name in FORMATS
    yield "its name in RowFormat of objectives/rows.py", name in get_args(RowFormat)
    yield "rows of ROW_KEYS", any(name in row.formats for row in ROW_KEYS)
    yield "a test of its rows", is_in(f'"{name}"', "tests/unit/data/documents/test_chat_formats.py")
    yield "docs/howto/chat.md", is_in(f"`{name}`", "docs/howto/chat.md")
    yield "docs/reference/row_keys.md (make reference)", is_in(name, "docs/reference/row_keys.md")


def check_option(name: str) -> Iterator[tuple[str, bool]]:
    from bigtrain.commands.registry import build_parser

    command, flag = name.rsplit(" ", 1)
    parser = build_parser(*command.split()[:1])
    for word in command.split():
        parser = parser.commands[word]  # type: ignore[assignment]
    action = parser._option_string_actions.get(flag)
    yield f"a field of its Arguments with the option {flag}", action is not None
    yield "a text below the field", bool(action and action.help)
    yield "docs/reference/commands.md (make reference)", is_in(f"`{flag}", "docs/reference")
    yield "a test that names it", is_in(flag, "tests")


def check_launcher(variable: str) -> Iterator[tuple[str, bool]]:
    yield "bigtrain/system reads the variable", is_in(variable, "bigtrain/system")
    yield (
        "tests/unit/system/test_world.py sets it",
        is_in(variable, "tests/unit/system/test_world.py"),
    )
    yield (
        "what remains below another launcher is tested",
        is_in(variable, "tests/unit/system/test_launcher_variables.py"),
    )


def check_architecture(model_type: str) -> Iterator[tuple[str, bool]]:
    from tiny_models import tiny_config

    yield "tools/tiny_models.py makes a small configuration", tiny_config(model_type) is not None
    yield "a row of docs/architectures.md", is_in(f"`{model_type}`", "docs/architectures.md")


def check_degree(name: str) -> Iterator[tuple[str, bool]]:
    from bigtrain.settings.compatibility.facts import Facts
    from bigtrain.settings.degrees import ModelDegrees
    from bigtrain.settings.sections.running import ParallelSection

    size = f"{name}_size"
    yield "a field of ParallelSection", name in ParallelSection.model_fields
    yield f"{size} of ModelDegrees", size in ModelDegrees.__dataclass_fields__
    yield f"{size} of Facts, for the compatibility rules", hasattr(Facts, size)
    yield "a feature for the rules", is_in(size, "bigtrain/settings/compatibility/features.py")
    yield "its groups in mesh.py", is_in(f'"{name}', "bigtrain/engine/startup/mesh.py")
    yield "the planner reads it", is_in(size, "bigtrain/planner")
    yield "bigtrain parity lists it", is_in(name, "bigtrain/parity/topologies.py")
    yield "the parity matrix trains it", is_in(name, "tests/parity/test_matrix.py")
    yield "a golden run", is_in(name, "tests/golden/runs.py")
    yield "a row of docs/reference/configuration.md", is_in(f"`parallel.{name}`", "docs/reference")


GUIDES = {
    "metric": Guide(
        check_metric, ("tests/unit/run/reporting", "tests/unit/report", "tests/docs", *FAST)
    ),
    "objective": Guide(
        check_objective,
        ("tests/unit/objectives", "tests/parity/test_objectives.py", *NAMED),
    ),
    "optimizer": Guide(
        check_optimizer,
        ("tests/parity/test_optimizers.py", "tests/parity/test_optimizer_checkpoints.py", *NAMED),
    ),
    "format": Guide(
        check_format, ("tests/unit/data/documents", "tests/unit/data/tokenize_job", *FAST)
    ),
    "row-format": Guide(
        check_row_format,
        (
            "tests/unit/data/documents/test_chat_formats.py",
            "tests/unit/commands/test_tokenize_formats.py",
            *FAST,
        ),
    ),
    "option": Guide(
        check_option,
        ("tests/unit/commands/test_help.py", "tests/unit/python_api", "tests/docs", *FAST),
    ),
    "launcher": Guide(check_launcher, ("tests/unit/system", *FAST)),
    "degree": Guide(
        check_degree, ("tests/unit/settings/test_topology.py", "tests/parity/test_matrix.py", *FAST)
    ),
    "architecture": Guide(check_architecture, ("tests/parity/test_architectures.py", *NAMED)),
}


def is_in(text: str, *paths: str) -> bool:
    """Return whether a file of the checkout below one of `paths` has `text`."""
    command = ["git", "grep", "--untracked", "-qF", "-e", text, "--", *paths]
    return subprocess.run(command, cwd=ROOT).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("guide", choices=GUIDES)
    parser.add_argument("name", help="what was added")
    parser.add_argument("--no-tests", action="store_true", help="check the steps only")
    args = parser.parse_args()
    guide = GUIDES[args.guide]
    passed = True
    for step, is_done in guide.steps(args.name):
        passed &= is_done
        print(f"{'done   ' if is_done else 'missing'}  {step}")
    if passed and not args.no_tests:
        command = [sys.executable, "-m", "pytest", *(t.format(name=args.name) for t in guide.tests)]
        print(" ".join(command), flush=True)
        offline = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        passed = subprocess.run(command, cwd=ROOT, env={**os.environ, **offline}).returncode == 0
    print("PASS" if passed else "FAIL")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
