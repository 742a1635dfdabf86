"""Bytes that the update of bfloat16 training moves on one of several GPUs, counted on the trace of
a step, beside the least that it could move: ``python -m benchmarks.gpu_roofline.replicas``.

The update is all between a parameter's gradient and its new value: adding up gradients, their
exchange, norm, clipping, AdamW, and the exchange of the parameters.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from benchmarks.gpu_proof.fake_cuda import why_not
from benchmarks.gpu_roofline.__main__ import UPDATE_PARTS, answers, kernel_of
from benchmarks.gpu_roofline.kernel import Kernel
from benchmarks.support.points import SIZES, Point

LIMIT = 1.2
"""Times the least that an update may move."""


@dataclass(frozen=True)
class Layout:
    """What the least depends on: ZeRO stage 1 or 2, ranks with other samples, passes of a step."""

    zero_stage: int
    num_replicas: int
    num_passes: int

    @property
    def name(self) -> str:
        """The layout in words."""
        return f"ZeRO {self.zero_stage}, {self.num_replicas} replicas, {self.num_passes} passes"


LAYOUTS = tuple(
    Layout(stage, replicas, passes)
    for stage in (1, 2) for replicas in (1, 2, 8) for passes in (1, 4)
)  # fmt: skip


def least_bytes(layout: Layout) -> float:
    """Return the least bytes for each parameter and step in the device memory of one rank.

    Parameters and their gradients are in bfloat16 (2 bytes), sums, masters and two moments in
    float32 (4 bytes). With N replicas a rank updates 1/N of the parameters; every tensor is read
    and written once where it is used, and nothing is copied for its own sake:

    - A gradient of the backward pass is read and written as float32 where the exchange, or with
      one replica the update, reads it: 2 + 4. That of a further pass is read and added: 2 + 8.
    - Reduce-scatter: a rank reads all its sums and writes the sum of what it owns: 4 + 4/N. ZeRO 1
      exchanges once a step. ZeRO 2 keeps only what a rank owns, so it exchanges in every pass, each
      time what that pass wrote (2 + 4), and adds the sum of a further pass to its own: 12/N.
    - The norm reads what the rank owns: 4/N. Averaging and clipping are factors of the update.
    - AdamW reads gradient, master and two moments, and writes the last three and the bfloat16
      parameter: (4 x 4 + 3 x 4 + 2)/N = 30/N.
    - All-gather: a rank reads its parameters and writes the others': 2/N + 2 (N - 1)/N.

    One replica exchanges nothing: 6 + 4 + 30 = 40 bytes in a step of one pass.
    """
    replicas, further = layout.num_replicas, layout.num_passes - 1
    end = (4 + 30) / replicas
    if replicas == 1:
        return 6 + 10 * further + end
    scatter, gather = 4 + 4 / replicas, 2
    if layout.zero_stage == 1:
        return 6 + 10 * further + scatter + end + gather
    return layout.num_passes * (6 + scatter) + further * 12 / replicas + end + gather


def point_of(layout: Layout, size: str = "50m") -> Point:
    """Return what is traced of a layout. Bytes for each parameter hardly depend on the size."""
    return Point(
        size=size, zero_stage=layout.zero_stage, accumulation=layout.num_passes,
        micro_batch_size=1, dtype="bf16", rounds=1, steps_per_round=1, threads=1,
        contenders=("bigtrain",), sequence_length=64, loss="chunked",
    )  # fmt: skip


def num_parameters(size: str) -> int:
    """Return the parameters of a size of `SIZES`, whose embeddings are tied."""
    shape = SIZES[size]
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    keys = hidden // heads * shape.get("num_key_value_heads", heads)
    matrices = 2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * shape["intermediate_size"]
    layers = shape["num_hidden_layers"] * (matrices + 2 * hidden)
    return layers + shape["vocab_size"] * hidden + hidden


def moved_bytes(kernels: Iterable[Kernel], num_parameters: int) -> dict[str, float]:
    """Return the bytes for each parameter that `kernels` move, by part of the update."""
    moved = dict.fromkeys(UPDATE_PARTS, 0.0)
    for kernel in kernels:
        if kernel.part in moved:
            moved[kernel.part] += kernel.num_bytes / num_parameters
    return moved


def traced_kernels(layouts: Sequence[Layout], size: str = "50m") -> list[list[Kernel]]:
    """Return the kernels of a step of each layout, traced in a process of their own."""
    points = [[asdict(point_of(layout, size)), layout.num_replicas] for layout in layouts]
    steps = answers("benchmarks.gpu_roofline.traced_step", points)
    return [[kernel_of(values) for values in step] for step in steps]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table. Returns the exit code: 1 if an update moves more than `LIMIT` times the
    least."""
    parser = argparse.ArgumentParser(prog="gpu_roofline.replicas", description=__doc__)
    parser.add_argument("--only", default="", help="layouts whose name contains this text")
    parser.add_argument("--kernels", action="store_true", help="list the kernels of each update")
    args = parser.parse_args(argv)
    if reason := why_not():
        print(f"gpu_roofline: {reason}", file=sys.stderr)
        return 2
    print(f"| bytes for each parameter | {' | '.join(UPDATE_PARTS)} | moved | least | ratio |")
    print("|---" * (len(UPDATE_PARTS) + 4) + "|")
    layouts = [layout for layout in LAYOUTS if args.only in layout.name]
    is_within = True
    for layout, kernels in zip(layouts, traced_kernels(layouts), strict=True):
        moved = moved_bytes(kernels, num_parameters("50m"))
        total, least = sum(moved.values()), least_bytes(layout)
        cells = " | ".join(f"{value:.1f}" for value in moved.values())
        ratio = total / least
        print(f"| {layout.name} | {cells} | {total:.1f} | {least:.1f} | {ratio:.2f} |")
        if args.kernels:
            print(kernels_text(kernels))
        is_within &= ratio <= LIMIT
    return 0 if is_within else 1


def kernels_text(kernels: Iterable[Kernel]) -> str:
    """Return the kernels of an update by bytes for each parameter, most bytes first."""
    by_name: dict[str, int] = {}
    for kernel in kernels:
        if kernel.part in UPDATE_PARTS:
            name = f"{kernel.part}: {kernel.name}"
            by_name[name] = by_name.get(name, 0) + kernel.num_bytes
    ordered = sorted(by_name.items(), key=lambda item: -item[1])
    count = num_parameters("50m")
    return "\n".join(f"  {num_bytes / count:7.2f}  {name}" for name, num_bytes in ordered)


if __name__ == "__main__":
    sys.exit(main())
