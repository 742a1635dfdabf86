"""Write docs/compatibility.md: every compatibility rule, and every known trap of DeepSpeed.

python tools/compatibility.py --output docs/compatibility.md
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from bigtrain.settings.compatibility.check import RULES  # noqa: E402
from bigtrain.settings.compatibility.facts import FACTS, Facts  # noqa: E402
from bigtrain.settings.compatibility.rule import Rule  # noqa: E402
from tools.compatibility_traps import TRAPS, Trap  # noqa: E402

__all__ = ["TRAPS", "page"]

_HEAD = """\
# What cannot run

Every run refuses these combinations before there is a process group. `bigtrain check` refuses
those that it can know: a device only with `--device`, a missing libaio never. It reads the heads
that tensor-parallel ranks divide from transformers' plan for the type of the model.

The key in parentheses is the one that the error names. A leading `ds:` is a key of the DeepSpeed
JSON, any other key is of the run. The last column is what the rule itself changes of the example;
an error names other ways too.

| rule | example | nearest that runs |
|---|---|---|
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

_WRITTEN = """
Written by `python tools/compatibility.py --output docs/compatibility.md` from
`bigtrain/settings/compatibility/` and `tools/compatibility_traps/`. Each rule has a test made from
its example (`tests/unit/settings/compatibility/test_compatibility.py`).
"""

_MODEL_KEYS = {
    "attention_heads": "num_attention_heads",
    "cut_heads": "num_attention_heads",
    "cut_key_heads": "num_key_value_heads",
    "num_layers": "num_hidden_layers",
    "max_positions": "max_position_embeddings",
    "num_experts": "num_experts",
}
"""Keys of a model's config.json by the facts that are read from it."""
_SWITCHES = {
    "num_mtp_layers": ("layers for multi-token prediction", "no such layers in the model"),
    "has_tensor_plan": ("a tensor-parallel plan", "no tensor-parallel plan"),
    "async_io": ("libaio", "no libaio"),
    "accelerate": ("engine settings of accelerate", "a DeepSpeed JSON"),
    "isolates": ("`data.document_boundaries=isolate`", "`data.document_boundaries=ignore`"),
    "pipeline_block": ("a block `ds:pipeline`", "no block `ds:pipeline`"),
    "freezes": ("`model.frozen` or `adapters`", "no `model.frozen`, no `adapters`"),
    "loss_terms": ("`objective.z_loss` or `objective.label_smoothing`", "`objective.z_loss=0`"),
    "needs_reference": ("an objective with a reference", "`objective.type=next_token`"),
    "scores_samples": ("a score head", "`objective.type=next_token`"),
    "stored_reference": ("`objective.reference`", "no `objective.reference`"),
    "grows_vocabulary": ("`model.vocabulary`", "no `model.vocabulary`"),
    "stops_early": ("`evaluation.early_stopping`", "no `evaluation.early_stopping`"),
    "bias_updates": ("`moe.bias_update_rate` above 0", "`moe.bias_update_rate=0`"),
}
"""Facts that are true or false without being a key of their own: as users set or see them."""


def page() -> str:
    """Return the text of docs/compatibility.md."""
    rules = "\n".join(_row(name, rule) for name, rule in RULES.items())
    traps = "\n".join(_trap(trap) for trap in TRAPS)
    return f"{_HEAD}{rules}\n{_FOUND}{traps}\n{_WRITTEN}"


def _row(name: str, rule: Rule) -> str:
    example = rule.violation()
    nearest = rule.nearest(example)
    # Also the defaults that the last column changes.
    facts = dict(_differences(Facts(), example)) | dict(_differences(nearest, example))
    said = [setting(name, value) for name, value in facts.items()]
    instead = [setting(name, value) for name, value in _differences(example, nearest)]
    key = rule.features[0].fact.key
    title = f"**{name}** (`{key}`): {rule.problem(example).rule}"
    cells = (title, ", ".join(said), ", ".join(instead))
    return f"| {' | '.join(cells)} |"


def setting(name: str, value: object) -> str:
    """Return a fact with this value as a user sets it, or sees it in the model or the machine."""
    if name in _SWITCHES:
        return _SWITCHES[name][0 if value else 1]
    if name == "world_size":
        return f"{value} rank{'s' if value != 1 else ''}"
    if name == "device":
        return f"`--device {value}`"
    if name == "pipeline_settings":
        assert isinstance(value, tuple)
        names = " and ".join(f"`ds:pipeline.{key}`" for key in value)
        return names or "nothing else in `ds:pipeline`"
    if name in _MODEL_KEYS:
        key = _MODEL_KEYS[name]
        return f"`{key}={value}` of the model" if value else f"a model without `{key}`"
    if name == "num_sites" and not value:
        return "no `sites`"
    text = value if isinstance(value, str) else json.dumps(value)
    return f"`{FACTS[name].key}={text}`"


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
