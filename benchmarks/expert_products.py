"""Comparison of the ways to compute a rank's experts: forward and backward seconds of one layer.

    python benchmarks/expert_products.py [--device cuda] [--rounds 5] [--output FILE.json]

Grouped products, padded ones, products batched by token and transformers' loop over the experts
take turns on the same layer and tokens. All compute the same function, which is compared. bigtrain
chooses only by width (`bigtrain.models.parallel.grouped_experts`): sums in another order have
other bits, so a choice by the clock would let a run resume with other ones. This shows what that
rule costs, and where. On a CPU the seconds are those of its thread, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from bigtrain.models.parallel.grouped_experts import PADDED, padded_works
from bigtrain.models.transformers_patches import modules_of_experts

MOST_BATCHED_BYTES = 256 * 1024**2
"""Bytes of weights that batched products gather for every token; beyond it they are skipped."""
# Relative to the largest output: rounding of sums in another order, in the dtype.
SAME = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Shape:
    """A layer and what it is given: tokens [T], of which each goes to `chosen` experts."""

    tokens: int
    experts: int
    chosen: int
    hidden: int
    width: int

    @property
    def name(self) -> str:
        return (
            f"{self.tokens} tokens, {self.chosen} of {self.experts} experts, "
            f"{self.hidden} x {self.width}"
        )

    @property
    def gathered(self) -> int:
        """Elements of all weights that batched products hold at once."""
        return self.tokens * self.chosen * 3 * self.hidden * self.width


SHAPES = {
    "small": [
        Shape(256, 8, 2, 256, 256),
        Shape(256, 64, 4, 256, 64),
        Shape(16, 64, 4, 256, 64),
        Shape(256, 8, 2, 258, 254),
        Shape(256, 64, 4, 258, 62),
        Shape(16, 64, 4, 258, 62),
    ],
    "tiny": [Shape(8, 4, 2, 32, 16), Shape(8, 4, 2, 34, 10)],
    "gpu": [
        Shape(8192, 8, 2, 4096, 14336),
        Shape(8192, 16, 8, 2048, 768),
        Shape(8192, 128, 8, 2048, 768),
        Shape(8192, 128, 8, 2048, 766),
    ],
}


def layer_of(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    """Return a model of one layer, and its module of experts."""
    config = CONFIG_MAPPING["qwen3_moe"](
        vocab_size=16,
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.width,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=shape.experts,
        num_experts_per_tok=shape.chosen,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device)
    (experts,) = modules_of_experts(model)
    return model, experts


def ways_of(shape: Shape, dtype: torch.dtype) -> list[str]:
    """Return names of transformers' registry: what can compute experts of this shape."""
    aligned = shape.hidden % 8 == shape.width % 8 == 0
    ways = ["grouped_mm"] if aligned else []
    if padded_works():
        ways.append(PADDED)
    if shape.gathered * dtype.itemsize <= MOST_BATCHED_BYTES:
        ways.append("batched_mm")
    return [*ways, "eager"]


def measure(
    shape: Shape, dtype: torch.dtype, device: torch.device, rounds: int
) -> dict[str, float]:
    """Median seconds of a forward and backward pass, by way. Raises RuntimeError where one has
    other outputs than the loop."""
    model, experts = layer_of(shape, dtype, device)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(shape.tokens, shape.hidden, generator=generator).to(device, dtype)
    scores = torch.rand(shape.tokens, shape.experts, generator=generator).to(device)
    weights, chosen = scores.softmax(-1).topk(shape.chosen, -1)
    weights = weights.to(dtype)

    def run(way: str) -> tuple[float, torch.Tensor]:
        model.set_experts_implementation(way)
        rows = hidden.clone().requires_grad_()
        begun = _now(device)
        outputs = experts(rows, chosen, weights)
        outputs.sum().backward()
        seconds = _now(device) - begun
        model.zero_grad()
        return seconds, outputs.detach()

    ways = ways_of(shape, dtype)
    outputs = {way: run(way)[1] for way in ways}  # the first allocates
    largest = float(outputs["eager"].abs().max())
    for way, output in outputs.items():
        if float((output - outputs["eager"]).abs().max()) > SAME[dtype] * largest:
            raise RuntimeError(f"{way} computes something else at {shape.name}, {dtype}")
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            seconds[way].append(run(way)[0])
    return {way: statistics.median(output) for way, output in seconds.items()}


def _now(device: torch.device) -> float:
    """Return seconds, when the device has done all it was asked."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def measure_all(
    shapes: Sequence[Shape], device: torch.device, rounds: int
) -> Iterator[dict[str, Any]]:
    """Yield a row for each shape and dtype."""
    for shape in shapes:
        for dtype in SAME:
            seconds = measure(shape, dtype, device, rounds)
            yield {"shape": shape.name, "dtype": str(dtype).split(".")[1], "seconds": seconds}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=list(SHAPES), default="small", help="of the layers")
    parser.add_argument("--device", default="cpu", help="of torch")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way")
    parser.add_argument("--output", type=Path, help="JSON file for all results")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    torch.set_num_threads(1)
    rows = []
    print("milliseconds of a forward and backward pass, one thread on a CPU")
    for row in measure_all(SHAPES[args.size], torch.device(args.device), args.rounds):
        rows.append(row)
        times = "  ".join(f"{way} {1e3 * s:.2f}" for way, s in row["seconds"].items())
        print(f"{row['shape']:<44} {row['dtype']:<9} {times}", flush=True)
    if args.output is not None:
        args.output.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
