"""The defaults of larger models on several H100, priced by the planner: the share of each part of a
step, and the utilization: ``python -m benchmarks.gpu_roofline.layouts --write``.

The planner has the same prices as the kernels here (`pricing`): measured products and copies,
attention by head size, layers as they are traced, fused where a run fuses them. Collectives are
rings over the links and the network of `bigtrain/planner/tables/hardware.json`, in shares of their
bandwidth that are fitted to published rows.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bigtrain.planner.layout import Layout
from bigtrain.planner.model_costs import LayerCosts, ModelCosts
from bigtrain.planner.step_time import StepTime, step_time
from bigtrain.planner.tables.engines import engine_named
from bigtrain.planner.tables.hardware import Device

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- written by benchmarks.gpu_roofline.layouts -->", "<!-- end -->"
AIM = 0.5


@dataclass(frozen=True)
class Default:
    """A recipe on devices; its layout is what a plan of it writes, held to `overrides`."""

    name: str
    recipe: str
    gpus: str
    overrides: tuple[str, ...]


ONE = ("parallel.pipeline=1", "parallel.sequence=1")
DEFAULTS = (
    Default("Llama 3.2 1B", "llama3_1b", "1xH100-80GB", ("batch.global_tokens=131072",)),
    Default(
        "Llama 3 8B, ZeRO 3", "llama3_8b", "8xH100-80GB",
        ("engine.deepspeed_config=zero3", "parallel.tensor=1", *ONE),
    ),
    Default("Llama 3 8B, TP 2", "llama3_8b", "8xH100-80GB", ("parallel.tensor=2", *ONE)),
    Default("Qwen3-30B-A3B", "qwen3_30b_a3b", "16xH100-80GB", ()),
)  # fmt: skip


PRODUCTS, EXPERTS, ATTENTION = "other products", "products of experts", "attention"
COMPUTING = (PRODUCTS, EXPERTS, ATTENTION)
"""Parts of a step whose FLOPs count for utilization."""


@dataclass(frozen=True)
class Priced:
    """A step of a default: its layout in words, tokens per second and GPU, utilization, and the
    seconds of its parts."""

    name: str
    layout: str
    tokens_per_second: float
    utilization: float
    seconds: dict[str, float]

    def reason(self) -> str:
        """Return what keeps the step from `AIM`, by part; empty where it reaches it."""
        if self.utilization >= AIM:
            return ""
        total = sum(self.seconds.values())
        computing = sum(self.seconds.get(name, 0.0) for name in COMPUTING) / total
        others = sorted(self.seconds.items(), key=lambda item: -item[1])
        shares = ", ".join(
            f"{name} {seconds / total:.0%}"
            for name, seconds in others if name not in COMPUTING and seconds / total >= 0.01
        )  # fmt: skip
        during = self.utilization / computing
        return (
            f"- {self.name}: products and attention take {computing:.0%} of the step and reach "
            f"{during:.0%} of the peak there; the rest is {shares}."
        )


def parts_of(model: ModelCosts, layout: Layout, device: Device) -> dict[str, float]:
    """Return the seconds of a step of bigtrain by part: the planner's terms without recomputation,
    with attention, products of experts and what their MLPs move apart; then recomputation, of
    whatever kind. A part takes as long as a step without it is shorter."""
    engine = engine_named("deepspeed")
    if layout.fused_layers:
        model = model.with_fused_operations

    def once(change: Callable[[LayerCosts], LayerCosts] = lambda kind: kind) -> StepTime:
        kinds = tuple(replace(change(kind), fused=None) for kind in model.kinds)
        plain = layout.changed(recompute="none")
        return step_time(replace(model, kinds=kinds), plain, device, engine)

    def without_experts(kind: LayerCosts) -> LayerCosts:
        dense = tuple(matmul for matmul in kind.matmuls if matmul.num_groups == 1)
        kept = 1 - kind.mlp.moved * (len(dense) < len(kind.matmuls))
        return replace(
            kind,
            matmuls=dense,
            moved_bytes_whole=kind.moved_bytes_whole * kept,
            moved_bytes_cut=kind.moved_bytes_cut * kept,
        )

    whole, plain, dense = step_time(model, layout, device, engine), once(), once(without_experts)
    experts = plain.matmul - dense.matmul
    attention = plain.matmul - once(lambda kind: replace(kind, attention=None)).matmul
    terms = plain.terms() | {
        "memory-bound": dense.memory_bound,
        "dispatch and activations of experts": plain.memory_bound - dense.memory_bound,
    }
    return {
        PRODUCTS: terms.pop("matmul") - experts - attention,
        EXPERTS: experts,
        ATTENTION: attention,
        **terms,
        "recomputation": whole.total - plain.total,
    }


def price(default: Default) -> Priced:
    """Return the price of the layout that a plan of `default` writes."""
    from bigtrain.models.build import empty_model
    from bigtrain.models.configuration import load_hf_config
    from bigtrain.planner.flops import (
        flops_per_token,
        model_flops_utilization,
        model_shape,
        peak_flops_per_second,
    )
    from bigtrain.planner.tables.hardware import find_device
    from bigtrain.python_api.planning import plan
    from bigtrain.settings.hf_config_keys import written_configuration
    from bigtrain.settings.run_config import ModelSection

    found = plan(default.recipe, default.gpus, *default.overrides, varies=False)
    best = found.fitting[found.default_choice - 1]
    model = empty_model(
        load_hf_config(ModelSection(config=written_configuration(found.config.model)))
    )
    parameters = dict(model.named_parameters())
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    shape = model_shape(
        model.config.get_text_config(),
        [(name, p.numel()) for name, p in parameters.items()],
        next(name for name, p in parameters.items() if p is embedding),
        tied=head.weight is embedding,
    )
    assert shape is not None
    num_devices = found.cluster.num_devices
    device = find_device(default.gpus.partition("x")[2])
    flops = flops_per_token(shape, best.layout.sequence_length)
    peak = peak_flops_per_second(device.name, "bfloat16")
    utilization = model_flops_utilization(
        best.tokens_per_second, flops, peak, num_devices=num_devices
    )
    assert utilization is not None
    layout = best.describe() + (", fused layers" if best.layout.fused_layers else "")
    rate = best.tokens_per_second / num_devices
    return Priced(
        f"{default.name}, {num_devices} GPU{'s' * (num_devices > 1)}", layout, rate, utilization,
        parts_of(found.model, best.layout, device),
    )  # fmt: skip


def table(steps: Sequence[Priced]) -> str:
    """Return the shares of every step as Markdown, and why a step is below `AIM`."""
    names = list(dict.fromkeys(name for step in steps for name in step.seconds))
    lines = ["| share of a step | " + " | ".join(step.name for step in steps) + " |"]
    lines.append("|---" * (len(steps) + 1) + "|")
    lines.append("| layout | " + " | ".join(step.layout for step in steps) + " |")
    for name in names:
        cells = (step.seconds.get(name, 0.0) / sum(step.seconds.values()) for step in steps)
        lines.append(f"| {name} | " + " | ".join(f"{cell:.1%}" for cell in cells) + " |")
    lines.append(
        "| tokens/s/GPU | " + " | ".join(f"{step.tokens_per_second:,.0f}" for step in steps) + " |"
    )
    lines.append(
        "| utilization | " + " | ".join(f"{step.utilization:.1%}" for step in steps) + " |"
    )
    reasons = list(filter(None, (step.reason() for step in steps)))
    if reasons:
        lines += ["", f"Below {AIM:.0%}:", "", *reasons]
    return "\n".join(lines) + "\n"


def with_table(page: str, text: str) -> str:
    """Return `page` with `text` between its marks. Raises ValueError without marks."""
    if BEGIN not in page or END not in page.partition(BEGIN)[2]:
        raise ValueError(f"the page has no {BEGIN}")
    return re.sub(
        rf"(?s)({re.escape(BEGIN)}\n).*?({re.escape(END)})", lambda m: m[1] + text + m[2], page
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, or write it into the page."""
    parser = argparse.ArgumentParser(prog="gpu_roofline.layouts", description=__doc__)
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    args = parser.parse_args(argv)
    text = table([price(default) for default in DEFAULTS])
    print(text, end="")
    if args.write:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
