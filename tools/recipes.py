"""Write the layout that `bigtrain plan --write` takes into every recipe that names its hardware.

A recipe asks for it with one comment, which stays::

    # Layout: what `bigtrain plan --config NAME --gpus 8xH100 --as-configured --write DIR` takes.

The layout is that of this command, whatever its options are. The plan's prediction is in the
comment lines below, its settings are in the keys of `KEYS`; loss and buckets, which are not, stay
what a run decides by itself: --as-configured. With ``--check`` nothing is written, and the exit
code is 1 where a recipe differs from the plan. Hub names are planned from
``bigtrain/recipes/configs/``: each model's config.json, in the names of transformers 5, without
keys that change nothing. Runs read the hub's own.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path

from bigtrain.commands.plan import PlanArguments, ranked_layouts
from bigtrain.commands.registry import build_parser
from bigtrain.errors import BigtrainError, LaunchError, ModelError
from bigtrain.planner.search import Candidate, Cluster
from bigtrain.system.arguments import read_arguments
from bigtrain.system.shipped_files import recipes

GIB = 2.0**30
ASKS = re.compile(r"^(# Layout: what `bigtrain plan (.+)` takes\.\n)((?:# .*\n)*)", re.M)
KEYS = ("micro_batch_size", "gradient_checkpointing", "parallel", "deepspeed_config")
OF_LONG_SAMPLES = {"activation_offload": "false", "tiled_mlp": "'off'"}
"""Keys that a recipe needs if its layout has another value."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 on a difference")
    check = parser.parse_args().check
    same = True
    for path in planned_recipes():
        text = path.read_text(encoding="utf-8")
        try:
            planned = with_layout(text)
        except BigtrainError as error:
            print(f"{path}: {error}", file=sys.stderr)
            return error.exit_code
        if planned == text:
            print(f"{path}: up to date")
        elif check:
            same = False
            print(f"{path}: differs; run tools/recipes.py")
        else:
            path.write_text(planned, encoding="utf-8")
            print(f"wrote {path}")
    return 0 if same else 1


def planned_recipes() -> list[Path]:
    """Return the recipes that name their hardware."""
    return [
        path
        for path in sorted(recipes().glob("*.yaml"))
        if ASKS.search(path.read_text(encoding="utf-8"))
    ]


def command_of(text: str) -> PlanArguments:
    """Return the arguments of the command that a recipe's text names."""
    match = ASKS.search(text)
    assert match is not None
    arguments = build_parser("plan").parse_args(["plan", *shlex.split(match[2])])
    command: PlanArguments = read_arguments(arguments)
    return command


def with_layout(text: str) -> str:
    """Return a recipe's text with the current plan."""
    command = command_of(text)
    name, gpus = command.config, command.gpus
    plan = ranked_layouts(command)
    if plan.model.source != "traced":
        raise ModelError(
            f"the plan of {name} is by a closed form, not of the traced model: {plan.remark} -> "
            "correct the model's configuration in bigtrain/recipes/configs/"
        )
    best = plan.fitting[plan.default_choice - 1]
    if best.is_tight(plan.cluster):
        raise LaunchError(f"every layout of {name} on {gpus} is tight -> give it other hardware")
    text = ASKS.sub(lambda match: match[1] + prediction(best, plan.cluster), text, count=1)
    for key, value in settings_of(best).items():
        if OF_LONG_SAMPLES.get(key) == value and f" {key}:" not in text:
            continue
        text, changed = re.subn(rf"^( *{key}:).*$", rf"\1 {value}", text, flags=re.M)
        assert changed == 1, f"{name}: {key} occurs {changed} times"
    return text


def prediction(best: Candidate, cluster: Cluster) -> str:
    """Return comment lines on a layout, with predictions rounded to three digits."""
    rate = float(f"{best.tokens_per_second / cluster.num_devices:.3g}")
    memory, usable = best.memory.total / GIB, cluster.usable_memory / GIB
    return (
        f"# {best.layout.describe()}\n"
        f"# predicted, not measured: {memory:.3g} GiB of {usable:.3g} on the fullest GPU, "
        f"{rate:,.0f} tokens/s/GPU\n"
    )


def settings_of(best: Candidate) -> dict[str, str]:
    """Return the layout as values of `KEYS` and `OF_LONG_SAMPLES`. A JSON of ds_configs/ has no
    layout that moves only the optimizer under ZeRO 3; no recipe is ranked so."""
    layout = best.layout
    assert not layout.offload_optimizer
    sequence = str(layout.sequence_size)
    if layout.ring_size > 1:
        sequence = f"{{ulysses: {layout.ulysses_size}, ring: {layout.ring_size}}}"
    degrees = (
        f"{{tensor: {layout.tensor_size}, pipeline: {layout.pipeline_size}, sequence: {sequence}"
    )
    degrees += f", expert: {layout.expert_size}}}" if layout.expert_size > 1 else "}"
    tiles = "'off'" if layout.tiled_mlp == "off" else str(layout.tiled_mlp)
    values = (
        str(layout.micro_batch_size),
        str(layout.gradient_checkpointing),
        degrees,
        f"zero{layout.zero_stage}",
        str(layout.offload_activations).lower(),
        tiles,
    )
    return dict(zip((*KEYS, *OF_LONG_SAMPLES), values, strict=True))


if __name__ == "__main__":
    sys.exit(main())
