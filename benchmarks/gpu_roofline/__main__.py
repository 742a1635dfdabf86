"""Price optimizer steps on a GPU that is not here, kernel by kernel and by part, and compare the
prices with the steps that were measured on an H100."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.gpu_proof.fake_cuda import why_not
from benchmarks.gpu_roofline.kernel import PARTS, Kernel
from benchmarks.gpu_roofline.pricing import Roofline, Shape, price, priced_device
from benchmarks.gpu_roofline.rows import FURTHER, MEASURED, Row
from benchmarks.support.points import SIZES

ROOT = Path(__file__).resolve().parents[2]
UPDATE_PARTS = ("gradients", "optimizer", "exchange")
CAPABILITIES = {"H100": 90, "B200": 100}
"""Devices that steps are priced on, with the compute capability that layers are compiled for."""
_CROSS_ENTROPY = {
    *("_log_softmax", "nll_loss_forward", "nll_loss_backward", "_log_softmax_backward_data"),
}
"""Operators of a chunk's cross-entropy."""
LIMIT = 0.1
"""Largest relative error of a predicted step that was measured."""


def answers(module: str, argument: Any, *options: str) -> list[Any]:
    """Return the lines of JSON that `module`, in a process of its own, prints for `argument`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [sys.executable, "-m", module, json.dumps(argument), *options],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if result.returncode != 0:
        raise RuntimeError(f"{module} failed:\n{result.stderr[-2000:]}")
    return [json.loads(line) for line in result.stdout.splitlines()]


@cache
def _fused(
    micro_batch_size: int, size: str, float8: str, capability: int
) -> tuple[list[Kernel], list[float]]:
    """Return the kernels that Inductor generates for a decoder layer, of both passes, and the bytes
    that each kernel of a compiled cross-entropy moves for each logit."""
    point = {**asdict(MEASURED[0].point), "size": size, "micro_batch_size": micro_batch_size}
    point["float8"] = float8
    (schedules,) = answers("benchmarks.gpu_roofline.fused_layer", point, str(capability))
    update, loss_bytes = schedules.pop("update"), schedules.pop("loss")
    # Masters, gradients, moments and factors are read, parameters only written: 30 bytes.
    if update != [{"loads": 5, "stores": 4}]:
        raise RuntimeError(f"the update is not the one kernel that the trace counts: {update}")
    layer_kernels = [
        Kernel("inductor", part_of_fused(kernel["operations"]), kernel["num_bytes"],
               is_in_layer=True, is_backward=way == "backward")
        for way, kernels in schedules.items() for kernel in kernels
    ]  # fmt: skip
    return layer_kernels, loss_bytes


def part_of_fused(operations: Sequence[str]) -> str:
    """Return the part of a fused kernel by the operations that only one part has."""
    names = {operation.split(".")[1] for operation in operations}
    if names & {"rsqrt", "pow", "mean"}:
        return "norms"
    if names & {"exp", "sigmoid", "silu", "tanh", "erf"}:
        return "activations"
    if names & {"neg", "cat", "slice", "slice_scatter"}:
        return "rotary"
    if names & {"amax", "max", "clamp", "clamp_min", "abs", "reciprocal"}:
        return "casts"
    return "norms" if "sum" in names else "residuals"


def kernel_of(values: dict[str, Any]) -> Kernel:
    """Return the kernel whose fields JSON has."""
    return Kernel(**{**values, "product": values["product"] and tuple(values["product"])})


def kernels_of(row: Row, capability: int = 90) -> list[Kernel]:
    """Return the kernels of a step of `row`. Of compiled layers, Inductor's for a device of compute
    `capability` instead of those that the trace shows."""
    point = asdict(replace(row.point, compile="off"))
    options = ["--before"] if row.measured else []
    (traced,) = answers("benchmarks.gpu_roofline.traced_step", point, *options)
    kernels = [kernel_of(values) for values in traced]
    if row.point.compile != "on":
        return kernels
    times = SIZES[row.point.size]["num_hidden_layers"] * row.point.accumulation
    outside = [kernel for kernel in kernels if not kernel.is_in_layer or kernel.flops]
    point_of_layer = (row.point.micro_batch_size, row.point.size, row.point.float8)
    fused, loss_bytes = _fused(*point_of_layer, capability)
    if row.measured is None:  # the code that was measured did not compile the loss
        outside = with_fused_loss(outside, loss_bytes)
    return outside + times * fused


def with_fused_loss(kernels: Sequence[Kernel], bytes_of_logit: Sequence[float]) -> list[Kernel]:
    """Return `kernels` with the kernels that Inductor generates for the cross-entropy of each chunk
    of logits instead of the operators' kernels. bytes_of_logit: that each of them moves for a
    logit."""
    softmaxes = [kernel for kernel in kernels if kernel.name == "_log_softmax"]
    # Beside the operators of the loss: a cast of a chunk's logits to float32, and of their gradient
    # back (6 bytes for a logit, of which the softmax moves 16).
    casts = Counter(2 * [kernel.num_bytes * 6 // 16 for kernel in softmaxes])
    kept = []
    for kernel in kernels:
        is_cast = kernel.part == "loss" and kernel.name == "_to_copy"
        if is_cast and casts[kernel.num_bytes] > 0:
            casts[kernel.num_bytes] -= 1
        elif kernel.name not in _CROSS_ENTROPY:
            kept.append(kernel)
    return kept + [
        Kernel("inductor", "loss", round(num_bytes * kernel.num_bytes / 16))
        for kernel in softmaxes
        for num_bytes in bytes_of_logit
    ]


def shape_of(row: Row) -> Shape:
    """Return what the least of a step of `row` follows from."""
    size: Any = row.point.model_config or SIZES[row.point.size]
    hidden, num_heads = size["hidden_size"], size["num_attention_heads"]
    head_size = size.get("head_dim", hidden // num_heads)
    query_width = num_heads * head_size
    key_width = head_size * size.get("num_key_value_heads", num_heads)
    num_experts = size.get("num_experts", 1)
    wide = size["moe_intermediate_size" if num_experts > 1 else "intermediate_size"]
    layers = size["num_hidden_layers"]
    per_layer = 2 * hidden * (query_width + key_width) + 2 * hidden
    per_layer += num_experts * 3 * hidden * wide + (hidden * num_experts if num_experts > 1 else 0)
    tables = 1 if size.get("tie_word_embeddings", True) else 2
    return Shape(
        num_parameters=layers * per_layer + tables * size["vocab_size"] * hidden + hidden,
        num_tokens=row.tokens,
        num_passes=row.point.accumulation,
        hidden=hidden,
        intermediate=wide * size.get("num_experts_per_tok", 1),
        num_layers=layers,
        query_width=query_width,
        key_width=key_width,
        vocabulary=size["vocab_size"],
    )


def table(priced: dict[str, tuple[Row, Roofline]]) -> str:
    """Return the parts of every step in ms, its bytes per parameter, and its rate."""
    names = list(priced)
    lines = ["| ms of a step | " + " | ".join(names) + " | least |"]
    lines.append("|---" * (len(names) + 2) + "|")
    last = priced[names[-1]][1]
    for part in PARTS:
        cells = [f"{roofline.parts[part].seconds * 1e3:.1f}" for _, roofline in priced.values()]
        least = last.parts[part].least_seconds * 1e3
        lines.append(f"| {part} | " + " | ".join(cells) + f" | {least:.1f} |")
    idle = [f"{roofline.idle_seconds * 1e3:.1f}" for _, roofline in priced.values()]
    lines.append("| idle | " + " | ".join(idle) + " | 0.0 |")
    steps = [f"**{roofline.seconds * 1e3:.0f}**" for _, roofline in priced.values()]
    lines.append("| step | " + " | ".join(steps) + f" | {last.least_seconds * 1e3:.0f} |")
    update = []
    for row, roofline in priced.values():
        moved = sum(roofline.parts[part].num_bytes for part in UPDATE_PARTS)
        update.append(f"{moved / shape_of(row).num_parameters:.0f}")
    lines.append("| bytes of the update per parameter | " + " | ".join(update) + " | 30 |")
    rates, measured = [], []
    for row, roofline in priced.values():
        rate = row.tokens / roofline.seconds
        rates.append(f"{rate:,.0f}")
        measured.append("" if row.measured is None else
                        f"{row.measured:,.0f} ({rate / row.measured - 1:+.1%})")  # fmt: skip
    least_rate = priced[names[-1]][0].tokens / last.least_seconds
    lines.append("| tokens/s | " + " | ".join(rates) + f" | {least_rate:,.0f} |")
    lines.append("| measured | " + " | ".join(measured) + " | |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Price the steps whose name contains a text. Returns the exit code: 1 if a measured step is
    predicted more than `LIMIT` off."""
    parser = argparse.ArgumentParser(prog="gpu_roofline", description=__doc__)
    parser.add_argument("--only", default="", help="steps whose name contains this text")
    parser.add_argument(
        "--gpu",
        default="H100",
        choices=CAPABILITIES,
        help="(default: H100, on which six were measured)",
    )
    args = parser.parse_args(argv)
    if reason := why_not():
        print(f"gpu_roofline: {reason}", file=sys.stderr)
        return 2
    device, priced = priced_device(args.gpu), {}
    for row in (*MEASURED, *FURTHER) if args.gpu == "H100" else FURTHER:
        if args.only in row.name:
            kernels = kernels_of(row, CAPABILITIES[args.gpu])
            priced[row.name] = (row, price(kernels, device, shape_of(row)))
            print(f"{row.name}: {priced[row.name][1].seconds * 1e3:.0f} ms", flush=True)
    print(f"\nOn one {device.name}:\n\n{table(priced)}", end="")
    far = [
        row.name for row, roofline in priced.values()
        if row.measured and abs(row.tokens / roofline.seconds / row.measured - 1) > LIMIT
    ]  # fmt: skip
    for name in far:
        print(f"gpu_roofline: {name} is predicted more than {LIMIT:.0%} off", file=sys.stderr)
    return 1 if far else 0


if __name__ == "__main__":
    sys.exit(main())
