"""AdamW with moments of 8 bits (Dettmers et al. 2022, arXiv 2110.02861), as
`bitsandbytes.optim.AdamW8bit` (0.50.2, backends/cpu/ops.py, `_optimizer_update_8bit_blockwise_cpu`)
on full parameters in one process.

An element of a moment is a code into a table of 256 values; each block of 256 elements of the
flattened full parameter has a float32 scale: the largest magnitude in the block. If a block is on
several ranks, the ranks agree on the scale by an all-reduce; a maximum has no rounding. So codes,
scales and weights do not depend on how ZeRO and the parallel degrees divide a parameter.

The new moments are computed twice, for the scales and for the codes, so that only a part of the
elements is in float32 at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist

from bigtrain.engine.optimizers.masters import MasterPart
from bigtrain.engine.optimizers.update_rule import (
    ALLOCATES,
    Master,
    RuleInputs,
    UpdatedRectangle,
    UpdateRule,
    names_in_update,
    updated_rectangles,
)
from bigtrain.engine.startup.mesh import open_holders
from bigtrain.models.parallel.sharding import full_shape
from bigtrain.models.weights.quantized import import_bitsandbytes
from bigtrain.settings.sections.optimizer import BLOCK_ELEMENTS, OPTIMIZERS
from bigtrain.system.boxes import Box

CODES = OPTIMIZERS["adamw_8bit"].states
SCALES = ("exp_avg_scale", "exp_avg_sq_scale")
_CHUNK = 1 << 22
"""Elements whose moments are in float32 at a time."""


class Blocks:
    """Position of the elements of a rectangle in the blocks of a full tensor. index: numbers of the
    rectangle's blocks in the tensor. num_blocks: of the rectangle."""

    def __init__(self, shape: Sequence[int], box: Box, device: torch.device) -> None:
        self.index: slice | torch.Tensor
        # Positions of the rectangle's elements in the rectangle's blocks, one after another.
        self._positions: slice | torch.Tensor
        first, last = box.flat_ends(shape)
        if box.is_flat_range(shape):
            begin, end = first // BLOCK_ELEMENTS, last // BLOCK_ELEMENTS + 1
            self.index, self.num_blocks = slice(begin, end), end - begin
            start = first - begin * BLOCK_ELEMENTS
            self._positions = slice(start, start + box.num_elements)
        else:
            # Row-major positions of the elements of `box` in a tensor of this shape.
            flat = torch.zeros((), dtype=torch.int64, device=device)
            for length, offset, size in zip(shape, box.offsets, box.sizes, strict=True):
                coordinates = torch.arange(offset, offset + size, device=device)
                flat = flat.unsqueeze(-1) * length + coordinates
            flat = flat.view(-1)
            blocks, local_blocks = torch.unique_consecutive(
                flat // BLOCK_ELEMENTS, return_inverse=True
            )
            self.index, self.num_blocks = blocks, len(blocks)
            self._positions = local_blocks * BLOCK_ELEMENTS + flat % BLOCK_ELEMENTS

    def spread(self, elements: torch.Tensor, fill_values: torch.Tensor) -> torch.Tensor:
        """Return the full blocks [num_blocks, `BLOCK_ELEMENTS`] with the flat `elements` at their
        positions. `fill_values` [num_blocks]: per block, the value of elements that this rank does
        not have."""
        rows = fill_values.to(elements.dtype)[:, None].repeat(1, BLOCK_ELEMENTS)
        rows.view(-1)[self._positions] = elements
        return rows

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the elements of full blocks, flat; the inverse of `spread`."""
        return rows.reshape(-1)[self._positions]


class AdamW8bit(UpdateRule):
    """States: `CODES`, one byte per element, and on all ranks `SCALES` [blocks] by parameter.
    Collective over the ranks of a stage."""

    def __init__(
        self,
        betas: tuple[float, float],
        eps: float,
        shapes: Mapping[str, tuple[int, ...]],
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """shapes: of full parameters. device: of the scales, which the backend of `group` takes;
        without a group this rank has all elements of every block."""
        self._betas, self._eps, self._shapes = betas, eps, dict(shapes)
        self._device, self._group = device, group
        library = import_bitsandbytes().functional
        self._quantize = library.quantize_blockwise
        self._tables = tuple(library.create_dynamic_map(signed=signed) for signed in (True, False))
        self._parts: list[MasterPart] | None = None
        self._scales: dict[str, torch.Tensor] = {}

    @classmethod
    def of(cls, inputs: RuleInputs) -> Self:
        section = inputs.section
        shapes = {
            name: full_shape(parameter) or (1,)
            for name, parameter in inputs.model.named_parameters()
            if parameter.requires_grad
        }
        group = open_holders(inputs.mesh)[False]
        return cls(section.betas, section.eps, shapes, inputs.device, group)

    def attach(self, parts: Sequence[MasterPart]) -> None:
        self._parts = [part for part in parts if part.name in self._shapes]
        if self._parts:
            device = self._parts[0].master.device
            self._tables = tuple(table.to(device) for table in self._tables)

    def small_states(self) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        for name, scales in self._scales.items():
            yield name, dict(zip(SCALES, scales, strict=True))

    def update(self, masters: Sequence[Master], group: Mapping[str, Any]) -> None:
        for master in masters:
            master.step_count().add_(1)
            for moment in CODES:
                master.moment(moment, torch.uint8)
        if self._parts is None or not masters:
            return
        names = names_in_update(self._parts, masters, group)
        for name in names:
            if name not in self._scales:
                self._scales[name] = torch.zeros(self._scales_shape(name), device=self._device)
        if group.get(ALLOCATES):
            return
        new_scales = self.new_scales(names, masters)
        if self._group is not None:
            dist.all_reduce(new_scales, op=dist.ReduceOp.MAX, group=self._group)
        self.finish(names, masters, group, new_scales)

    def new_scales(self, names: Sequence[str], masters: Sequence[Master]) -> torch.Tensor:
        """Return the scales of the next moments of `names`, flat, from the elements of this
        rank."""
        new_scales = torch.zeros(
            sum(math.prod(self._scales_shape(name)) for name in names), device=self._device
        )
        scales_by_name = self._scales_by_name(names, new_scales)
        for rectangle, blocks in self._rectangles(masters):
            moments = self._next_moments(rectangle, blocks)
            zeros = moments[0].new_zeros(blocks.num_blocks)
            for scale, moment in zip(scales_by_name[rectangle.parameter], moments, strict=True):
                largest = blocks.spread(moment.abs_(), zeros).amax(1).to(self._device)
                scale[blocks.index] = torch.maximum(scale[blocks.index], largest)
        return new_scales

    def finish(
        self,
        names: Sequence[str],
        masters: Sequence[Master],
        group: Mapping[str, Any],
        new_scales: torch.Tensor,
    ) -> None:
        """Update masters and codes, with the scales `new_scales`, the maxima over all ranks."""
        # AdamW: x <- (1 - lr decay) x - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps).
        scales_by_name, step = self._scales_by_name(names, new_scales), int(masters[0].step_count())
        mean_correction = 1.0 - self._betas[0] ** step
        square_correction_root = math.sqrt(1.0 - self._betas[1] ** step)
        lr, decay = group["lr"], group["weight_decay"]
        for rectangle, blocks in self._rectangles(masters):
            moments = self._next_moments(rectangle, blocks)
            mean, square = moments
            values = rectangle.values.reshape(-1)
            if decay > 0.0:
                values.mul_(1.0 - lr * decay)
            divisor = (square.sqrt() / square_correction_root).add_(self._eps)
            values.addcdiv_(mean, divisor, value=-lr / mean_correction)
            if not rectangle.values.is_contiguous():
                rectangle.values.copy_(values.view(rectangle.values.shape))
            scales = scales_by_name[rectangle.parameter]
            for codes, moment, scale, table in zip(
                rectangle.states, moments, scales, self._tables, strict=True
            ):
                # The kernel takes the largest magnitude of a block as its scale. The scale fills
                # the positions of elements on other ranks, so that the kernel finds it.
                rows = blocks.spread(moment, scale[blocks.index].to(moment.device))
                quantized, _ = self._quantize(rows, code=table, blocksize=BLOCK_ELEMENTS)
                codes.copy_(blocks.take(quantized).view(codes.shape))
        for name in names:
            self._scales[name].copy_(scales_by_name[name])

    def _next_moments(
        self, rectangle: UpdatedRectangle, blocks: Blocks
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both moments after adding the gradient, in float32, flat."""
        gradient = rectangle.gradient.reshape(-1)
        moments = []
        for codes, scale, table in zip(
            rectangle.states, self._scales[rectangle.parameter], self._tables, strict=True
        ):
            # Decode: the table's value for a code, times the scale of the block.
            block_scales = scale[blocks.index].to(codes.device)[:, None].expand(-1, BLOCK_ELEMENTS)
            moments.append(table[codes.reshape(-1).int()] * blocks.take(block_scales))
        first, second = moments
        first.mul_(self._betas[0]).add_(gradient, alpha=1.0 - self._betas[0])
        second.mul_(self._betas[1]).addcmul_(gradient, gradient, value=1.0 - self._betas[1])
        return first, second

    def _rectangles(self, masters: Sequence[Master]) -> Iterator[tuple[UpdatedRectangle, Blocks]]:
        """Yield the rectangles that this rank updates, with their codes and their blocks."""
        assert self._parts is not None

        def codes(master: Master) -> Iterator[torch.Tensor]:
            return (master.moment(name, torch.uint8) for name in CODES)

        for rectangle in updated_rectangles(self._parts, masters, codes, _CHUNK):
            yield (
                rectangle,
                Blocks(self._shapes[rectangle.parameter], rectangle.box, rectangle.values.device),
            )

    def _scales_by_name(self, names: Sequence[str], flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return views of the scales in `flat`, by parameter."""
        shapes = [self._scales_shape(name) for name in names]
        parts = flat.split([math.prod(shape) for shape in shapes])
        return {
            name: part.view(shape) for name, shape, part in zip(names, shapes, parts, strict=True)
        }

    def _scales_shape(self, name: str) -> tuple[int, int]:
        return len(SCALES), -(-math.prod(self._shapes[name]) // BLOCK_ELEMENTS)


RULE = AdamW8bit
