"""Command lines that a user can type next, with which every command ends. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from bigtrain.system.shipped_files import checkout

RANKS_PER_NODE = 8
"""Devices of a usual node: a run of more ranks needs a hostfile."""


def next_lines(*commands: str) -> str:
    """Return the last lines of a command's output: the commands to type next."""
    return "\n".join(["next:", *(f"  {command}" for command in commands)])


def train_line(
    arguments: Sequence[str], num_ranks: int, ranks_per_node: int = RANKS_PER_NODE
) -> str:
    """Return the command that trains with `arguments` of train.py on `num_ranks` ranks."""
    program = Path("bigtrain/train.py")
    if not program.is_file():
        program = checkout() / program
    start = shlex.join([str(program), *arguments])
    num_nodes = -(-num_ranks // ranks_per_node)
    if num_nodes > 1:
        return f"deepspeed --hostfile HOSTFILE {start}   # a hostfile of {num_nodes} nodes"
    if num_ranks > 1:
        return f"deepspeed --quiet --num_accelerators {num_ranks} {start}"
    return f"python {start}"


def shards_line(shards: str | Path, tokenizer: str | None = None) -> str:
    """Return the command that writes a run YAML for token shards: for the trained weights next to
    their `tokenizer` (directory or Hub name), or else for a new model."""
    model = "--new-model quickstart"
    if tokenizer is not None:
        folder = Path(tokenizer)
        if any(folder.glob("*.safetensors")) or not folder.exists():
            model = f"--model {shlex.quote(tokenizer)}"
    return f"bigtrain init {model} --data {shlex.quote(str(shards))}"


def model_line(directory: str | Path) -> str:
    """Return the command that uses an exported model: a chat if its tokenizer has a chat template,
    a text to continue, or, for a model without a language model head, its verification."""
    quoted = shlex.quote(str(directory))
    folder = Path(directory)
    model_class = str(_read_object(folder / "config.json").get("architectures"))
    if "ForSequenceClassification" in model_class:
        return f"bigtrain verify --model {quoted}"
    has_template = (folder / "chat_template.jinja").is_file() or "chat_template" in _read_object(
        folder / "tokenizer_config.json"
    )
    return f"bigtrain generate --model {quoted} " + ("--chat" if has_template else "--prompt TEXT")


def run_lines(run: str | Path, export: Path | None) -> tuple[str, ...]:
    """Return the commands for a run that has ended: its report, and its exported model or, if
    `export` is None, its export."""
    quoted = shlex.quote(str(run))
    report = f"bigtrain report --run {quoted}"
    if export is None:
        return report, f"bigtrain export --run {quoted} --output {shlex.quote(f'{run}-export')}"
    return report, model_line(export)


def _read_object(path: Path) -> dict[str, object]:
    """Return the JSON object of a file; empty if there is none."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return tree if isinstance(tree, dict) else {}
