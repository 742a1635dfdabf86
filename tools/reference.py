"""Write the pages of docs/reference/ from the code.

python tools/reference.py [--output docs/reference]

One page each for the fields of the run YAML, DeepSpeed keys, keys of other trainers, the commands,
the keys of rows, the exit codes and errors, and the fields of metrics.jsonl. Imports no torch.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from bigtrain import errors  # noqa: E402
from bigtrain.cli import COMMANDS, build_parser  # noqa: E402
from bigtrain.commands.arguments import EXIT_CODES  # noqa: E402
from bigtrain.data.documents.conversations import FLAGS, OTHER_LEARNING  # noqa: E402
from bigtrain.data.documents.key_rules import table_of_keys  # noqa: E402
from bigtrain.metrics.step_metrics import Breakdown, StepMetrics  # noqa: E402
from bigtrain.run.reporting import metrics  # noqa: E402
from bigtrain.train import build_parser as train_parser  # noqa: E402
from tools.markdown import markdown_cell, sentence  # noqa: E402
from tools.reference_convert import convert_page  # noqa: E402
from tools.reference_deepspeed import deepspeed_keys_page  # noqa: E402
from tools.reference_fields import fields_page  # noqa: E402
from tools.reference_python import python_page  # noqa: E402

OUTPUT = ROOT / "docs" / "reference"
_WRITTEN = "\nWritten by `python tools/reference.py` from {source}; do not edit this page.\n"

# Advice to the user by exit code.
_START_AGAIN = {
    "EXIT_USER_ERROR": "after it is fixed",
    "EXIT_STOPPED": "yes, it continues",
    "EXIT_HANG": "yes, it continues from its newest checkpoint",
    "EXIT_STALE_LAUNCH": "no",
    "EXIT_FAULTY_HOST": "on other hosts, it continues",
}


def pages() -> dict[str, str]:
    """Return the text of every page, by the name of its file."""
    texts = {
        "configuration.md": (
            fields_page(),
            "`bigtrain/settings/run_config.py` and `bigtrain/settings/sections/`",
        ),
        "commands.md": (_commands(), "`bigtrain/commands/` and `bigtrain/train.py`"),
        "exit_codes.md": (_exit_codes(), "`bigtrain/errors.py`"),
        "metrics.md": (
            _metrics(),
            "`bigtrain/metrics/step_metrics.py` and `bigtrain/run/reporting/metrics.py`",
        ),
        "deepspeed_keys.md": (deepspeed_keys_page(), "`bigtrain/settings/deepspeed/accepted.py`"),
        "convert.md": (convert_page(), "`bigtrain/settings/conversion/`"),
        "row_keys.md": (_row_keys(), "`bigtrain/data/documents/row_keys.py`"),
        "python.md": (python_page(), "the functions"),
    }
    return {
        name: f"{text.rstrip()}\n{_WRITTEN.format(source=source)}"
        for name, (text, source) in texts.items()
    }


# --- commands


def _commands() -> str:
    parts = [
        "# Commands\n",
        "`bigtrain COMMAND --help` prints the same. [Exit codes](exit_codes.md) have their own "
        "page.\n",
        "| command | what it does |\n|---|---|",
    ]
    rows = [
        f"| [`bigtrain {n}`](#bigtrain-{n}) | {markdown_cell(s)} |" for n, s in COMMANDS.items()
    ]
    parts += ["\n".join(rows), "| [`train.py`](#trainpy) | train; every launcher starts it |\n"]
    for name in COMMANDS:
        parser = _subparsers(build_parser(name))[name]
        parts += _command(f"bigtrain {name}", parser, 2)
    parts += _command("train.py", train_parser(), 2)
    return "\n".join(parts)


def _command(title: str, parser: argparse.ArgumentParser, level: int) -> list[str]:
    parts = [f"{'#' * level} {title}\n"]
    if parser.description:
        parts.append(f"{sentence(parser.description)}")
    nested = _subparsers(parser)
    rows = [row for row in map(_argument, parser._actions) if row]
    if rows:
        parts.append("| argument | meaning |\n|---|---|\n" + "\n".join(rows) + "\n")
    if parser.epilog and parser.epilog != EXIT_CODES:  # their page has more
        parts.append(f"{sentence(parser.epilog)}")
    for name, subparser in nested.items():
        parts += _command(f"{title} {name}", subparser, level + 1)
    return parts


def _subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    subparsers = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return {name: sub for action in subparsers for name, sub in action.choices.items()}


def _argument(action: argparse.Action) -> str:
    """Return a row for one argument; not argparse's own text, which every Python lays out
    otherwise."""
    hidden = action.help == argparse.SUPPRESS
    if hidden or isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)):
        return ""
    value = action.metavar or action.dest
    value = " ".join(value) if isinstance(value, tuple) else value
    if action.choices is not None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    elif action.option_strings and action.metavar is None:
        value = value.upper()
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    shown = f"{names} `{value}`" if names and action.nargs != 0 else names or f"`{value}`"
    many = " ..." if action.nargs in ("*", "+") else ""
    known = {**vars(action), "prog": "bigtrain", "metavar": value}
    text = markdown_cell((action.help or "") % known)
    if action.required and action.option_strings:
        text = f"(required) {text}"
    elif action.nargs in ("*", "?") and not action.option_strings:
        text = f"(optional) {text}"
    return f"| {shown.replace('|', chr(92) + '|')}{many} | {text} |"


# --- keys of rows


def _row_keys() -> str:
    """Return the page of the keys that other tools read in a row, and what is done with each."""
    parts = [
        "# Keys of a row\n",
        "Each key that TRL, Axolotl, LLaMA-Factory, ms-swift and transformers read in a row, in "
        "the [formats](../howto/your_data.md) of `bigtrain tokenize --format`. A key that changes "
        "what is learned is used or refused. Values that change nothing (`null`, empty, a weight "
        "of 1) are accepted. Other keys are counted in `manifest.json` and named once, with what "
        "they may have meant. `--ignore-key KEY` accepts a refused key.\n",
        "| keys | rows | read by | in bigtrain |\n|---|---|---|---|",
    ]
    cells = [" | ".join(map(markdown_cell, line)) for line in table_of_keys()]
    parts += ["\n".join(f"| {line} |" for line in cells), ""]
    parts.append("Keys of a message that change its loss:\n\n| key | in bigtrain |\n|---|---|")
    rows = {"weight": "used: a factor of the loss of its tokens; 0: not learned (OpenAI)"}
    rows |= dict.fromkeys(FLAGS, "used: whether it is learned (Axolotl, ms-swift)")
    rows |= {key: f"refused: {why}" for key, why in OTHER_LEARNING.items()}
    parts += ["\n".join(f"| `{key}` | {markdown_cell(text)} |" for key, text in rows.items()), ""]
    return "\n".join(parts)


# --- exit codes and errors


def _exit_codes() -> str:
    parts = [
        "# Exit codes\n",
        "| exit code | name | meaning | start it again? |\n|---|---|---|---|",
        "| 0 | | complete | |",
        "| 1 | | a bug, or a process that the watchdog could only end from C | yes |",
    ]
    codes = sorted(_exit_code_texts(), key=lambda item: item[1])
    parts += [
        f"| {code} | `{n}` | {markdown_cell(text)} | {_START_AGAIN[n]} |" for n, code, text in codes
    ]
    parts += [
        "\ntorchrun and accelerate turn every code into 1. `slurm/train.sbatch` and "
        "`bigtrain launch torchrun` start torchrun by `bigtrain.launchers.agent`, which ends with "
        "the code of the rank that failed first. [Failures](../failures.md) lists the causes of "
        "each code.\n",
        "## Errors\n",
        "| error | exit code | of |\n|---|---|---|",
        "\n".join(_error_rows(errors.BigtrainError)) + "\n",
    ]
    return "\n".join(parts)


def _exit_code_texts() -> Iterator[tuple[str, int, str]]:
    """Name, value and meaning of every exit code; the meaning is the string below the value."""
    body = ast.parse(inspect.getsource(errors)).body
    for statement, following in zip(body, [*body[1:], None], strict=True):
        if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
            continue
        name = statement.targets[0].id
        if name.startswith("EXIT_"):
            said = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            text = following.value.value if said else ""  # type: ignore[union-attr]
            yield name, getattr(errors, name), str(text)


def _error_rows(error: type[errors.BigtrainError]) -> Iterator[str]:
    meaning = (error.__doc__ or "").split("\n\n")[0]
    yield f"| `{error.__name__}` | {error.exit_code} | {markdown_cell(meaning)} |"
    own = [sub for sub in error.__subclasses__() if sub.__module__ == errors.__name__]
    for sub in own:
        yield from _error_rows(sub)


# --- metrics


def _metrics() -> str:
    parts = [
        "# Metrics\n",
        "## A logged step\n",
        "| field | type | meaning |\n|---|---|---|",
    ]
    parts += _rows(StepMetrics)
    parts += [
        "\n## The breakdown of a step\n",
        inspect.cleandoc(Breakdown.__doc__ or "").replace("\n", " "),
        "\n| field | type | meaning |\n|---|---|---|",
        *_rows(Breakdown),
    ]
    text = inspect.cleandoc(metrics.__doc__ or "")
    parts += ["\n## All kinds of lines\n", _restructured(text.split("\n\n", 1)[1])]
    return "\n".join(parts)


def _rows(kind: type) -> Iterator[str]:
    """Yield the rows of the metrics that a dataclass declares."""
    for field in fields(kind):
        unit = field.metadata.get("unit")
        meaning = field.metadata["meaning"] + (f" ({unit})" if unit else "")
        yield f"| `{field.name}` | {_json_type(field.type)} | {markdown_cell(meaning)} |"


def _json_type(kind: object) -> str:
    """Return an annotation as what it is in JSON."""
    text = re.sub(r"Mapping\[[^\]]*\]|Breakdown", "object", str(kind))
    return text.replace("None", "null").replace("|", "or")


def _restructured(text: str) -> str:
    """Return a docstring with literal blocks (``::``) as Markdown."""
    lines: list[str] = []
    for block in text.split("\n\n"):
        if block.startswith("    "):
            lines += ["```text", textwrap.dedent(block).strip(), "```", ""]
        else:
            lines += [block.replace("::", ":").replace("``", "`"), ""]
    return "\n".join(lines)


def main() -> int:
    """Write the pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of the pages")
    folder: Path = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
