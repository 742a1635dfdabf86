"""The part on experts: what share of the device's peak their grouped matrix products reach."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from benchmarks.gpu_check.machine import seconds_of
from benchmarks.gpu_check.results import Part, Setup
from bigtrain.planner.flops import peak_flops_per_second

HIDDEN, WIDTH, EXPERTS, CHOSEN, TOKENS = 2048, 768, 128, 8, 8192
"""Qwen3-30B-A3B's (its config.json on the hub: hidden_size, moe_intermediate_size, num_experts,
num_experts_per_tok), and two samples of 4,096 tokens."""
_WORST_ERROR = 0.02
"""Error of a product in bfloat16, whose precision is 1/256, relative to the largest element."""


def grouped_products(setup: Setup, part: Part) -> None:
    """Measure the three grouped products of a layer's two stacks (forward, and both gradients), by
    transformers' own operator, with as many tokens for each expert and with uneven numbers;
    compared with one full product of as many operations, and the peak of the device's data
    sheet."""
    sizes = (64, 32, 4, 2, 24) if setup.tiny else (HIDDEN, WIDTH, EXPERTS, CHOSEN, TOKENS)
    hidden, width, num_experts, chosen, tokens = sizes
    num_rows = tokens * chosen
    peak = (
        peak_flops_per_second(torch.cuda.get_device_name(0), "bfloat16") if setup.on_gpu else None
    )
    if peak is None:
        part.note("share_of_peak", "needs CUDA, and a device whose peak is known")
    shares: list[float] = []
    for name, counts in _loads(num_rows, num_experts).items():
        ends = counts.cumsum(0).to(torch.int32).to(setup.device)
        for stack, rows, columns in (("up", hidden, 2 * width), ("down", width, hidden)):
            calls = _calls(setup, part, (num_rows, rows, columns), ends)
            seconds = {call: seconds_of(setup, function) for call, function in calls}
            flops = 2 * num_rows * rows * columns
            full = flops / seconds.pop("full")
            rates = {call: flops / taken for call, taken in seconds.items()}
            part.figures[f"{name}, {stack}"] = {
                **{f"{call}_tflops": rate / 1e12 for call, rate in rates.items()},
                "whole_tflops": full / 1e12,
                "forward_over_whole": rates["forward"] / full,
                **({} if peak is None else {"forward_of_peak": rates["forward"] / peak}),
            }
            if name == "even":
                three = 3 * flops / sum(seconds.values())
                shares.append(three / (full if peak is None else peak))
    part.figures["share_of_whole" if peak is None else "share_of_peak"] = sum(shares) / len(shares)


def _loads(num_rows: int, num_experts: int) -> dict[str, torch.Tensor]:
    """Return rows of each expert: the same, and with the busiest at several times the mean."""
    even = torch.full((num_experts,), num_rows // num_experts)
    generator = torch.Generator().manual_seed(0)
    wishes = torch.rand(num_experts, generator=generator).pow(3) + 1e-3
    uneven = (wishes / wishes.sum() * num_rows).long()
    for counts in (even, uneven):
        counts[counts.argmax()] += num_rows - counts.sum()
    return {"even": even, "uneven": uneven}


def product(rows: torch.Tensor, stacks: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return rows up to ``ends[0]`` times the first of `stacks`, and so on; as transformers calls
    it (integrations/moe.py)."""
    return F.grouped_mm(rows, stacks, offs=ends)


def _calls(
    setup: Setup, part: Part, shape: tuple[int, int, int], ends: torch.Tensor
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the timed calls by name; the first was compared with a product for each expert."""
    num_rows, size, columns = shape
    generator = torch.Generator(setup.device).manual_seed(1)

    def random(*sizes: int) -> torch.Tensor:
        made = torch.randn(sizes, device=setup.device, generator=generator, dtype=torch.float32)
        return made.to(torch.bfloat16)

    # [experts, columns, rows of the product] and transposed, as transformers' stacks are.
    inputs, stacks = random(num_rows, size), random(len(ends), columns, size).transpose(-2, -1)
    gradient = random(num_rows, columns)
    _compare(part, inputs, stacks, ends)
    yield "forward", lambda: product(inputs, stacks, ends)
    yield "to_inputs", lambda: product(gradient, stacks.transpose(-2, -1), ends)
    yield "to_weights", lambda: product(inputs.t(), gradient, ends)
    full = random(size, columns)
    yield "full", lambda: inputs @ full


def _compare(part: Part, rows: torch.Tensor, stacks: torch.Tensor, ends: torch.Tensor) -> None:
    """Fail the part if an expert's rows are not those times its matrix."""
    products = product(rows, stacks, ends)
    begin = 0
    for number, end in enumerate(ends.tolist()):
        exact = rows[begin:end].float() @ stacks[number].float()
        if end > begin:
            error = float((products[begin:end].float() - exact).abs().max() / exact.abs().max())
            part.check(error < _WORST_ERROR, f"expert {number} is {error:.3f} off")
        begin = end
