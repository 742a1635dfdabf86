"""Adafactor (Shazeer and Stern 2018, arXiv 1804.04235), as `torch.optim.Adafactor` (torch 2.13,
torch/optim/_adafactor.py), for parameters sharded by ZeRO and the parallel degrees.

The second moment is a number per row and per column of a matrix, and the step size depends on the
root mean square of full parameters: sums over elements, which one all-reduce of (rows + columns)
numbers and one of a number per parameter complete. So every rank has all states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from bigtrain.engine.optimizers.masters import MasterPart, cut_parts
from bigtrain.engine.optimizers.update_rule import (
    Master,
    RuleInputs,
    UpdatedRectangle,
    UpdateRule,
    names_in_update,
    updated_rectangles,
)
from bigtrain.engine.startup.mesh import Mesh, open_holders
from bigtrain.models.parallel.sharding import full_shape
from bigtrain.settings.sections.optimizer import AdafactorSection

_EPS = torch.finfo(torch.float32).eps
_SUMMED = {"row_var": -1, "col_var": -2, "variance": None}
"""The dimension over which each state is the mean of squared gradients."""


class Adafactor(UpdateRule):
    """States by parameter, on all ranks: `row_var` [..., rows, 1] and `col_var` [..., 1, columns]
    of matrices, `variance` of vectors. Collective over the ranks of a stage."""

    def __init__(
        self, section: AdafactorSection, model: nn.Module, mesh: Mesh, device: torch.device
    ) -> None:
        """Collective over all ranks. model: this stage. device: of the groups' backend."""
        self._section, self._device = section, device
        self._eps1 = _EPS if section.eps1 is None else section.eps1
        self._group = open_holders(mesh)[False]
        self._shapes = {
            name: full_shape(parameter) or (1,)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self._parts: list[MasterPart] | None = None
        self._copies: dict[str, float] = {}
        self._states: dict[str, dict[str, torch.Tensor]] = {}

    @classmethod
    def of(cls, inputs: RuleInputs) -> Self:
        return cls(inputs.section.adafactor, inputs.model, inputs.mesh, inputs.device)

    def attach(self, parts: Sequence[MasterPart]) -> None:
        self._parts = [part for part in parts if part.name in self._shapes]
        num_elements = dict.fromkeys(self._shapes, 0.0)
        for part in self._parts:
            for _, view in cut_parts(part.shard, part.start, part.of(part.master)):
                num_elements[part.name] += view.numel()
        total = self._summed(torch.tensor(list(num_elements.values()), dtype=torch.float64))
        # How many ranks hold an element; equal for all elements of a parameter.
        self._copies = {
            name: count / math.prod(self._shapes[name])
            for name, count in zip(num_elements, total.tolist(), strict=True)
        }

    def small_states(self) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        yield from self._states.items()

    def update(self, masters: Sequence[Master], group: Mapping[str, Any]) -> None:
        """Overwrites the gradients."""
        for master in masters:
            master.step_count().add_(1)
        if self._parts is None or not masters:
            return
        names = names_in_update(self._parts, masters, group)
        for name in names:
            self._states.setdefault(name, self._new_state(self._shapes[name]))
        if group["lr"] == 0:
            return  # `ensure_optimizer_states` only allocates states
        # Second moments V, then updates U = G / sqrt(V): both need sums over full parameters.
        rectangles = list(updated_rectangles(self._parts, masters))
        step = float(masters[0].step_count())
        squares = self._follow_moments(names, rectangles, step**self._section.beta2_decay)
        updates = self._totals(names, lambda box: self._direction(box).square_().sum(), rectangles)
        # alpha = max(eps2, RMS(X)) rho, and the update is divided by max(1, RMS(U) / d).
        lr, decay = group["lr"], group["weight_decay"]
        rho = min(lr, 1 / math.sqrt(step))
        for rectangle in rectangles:
            size = math.sqrt(math.prod(self._shapes[rectangle.parameter]))
            alpha = rho * max(self._section.eps2, math.sqrt(squares[rectangle.parameter]) / size)
            norm = math.sqrt(updates[rectangle.parameter])
            denominator = max(1.0, norm / (size * self._section.clip_threshold))
            rectangle.values.mul_(1 - lr * decay)
            rectangle.values.add_(rectangle.gradient, alpha=-alpha / denominator)

    def _new_state(self, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
        if len(shape) == 1:
            return {"variance": torch.zeros(shape)}
        return {
            "row_var": torch.zeros(*shape[:-1], 1),
            "col_var": torch.zeros(*shape[:-2], 1, shape[-1]),
        }

    def _follow_moments(
        self, names: Sequence[str], rectangles: Sequence[UpdatedRectangle], weight: float
    ) -> dict[str, float]:
        """Update the second moments with `weight`; return each parameter's sum of squares."""
        fresh = {name: self._new_state(self._shapes[name]) for name in names}
        for box in rectangles:
            squares = box.gradient.square()
            for state_name, total in fresh[box.parameter].items():
                slices = _place(total, box)
                dim = _SUMMED[state_name]
                total[slices] += (squares if dim is None else squares.sum(dim, keepdim=True)).cpu()
        flat = [total.view(-1) for state in fresh.values() for total in state.values()]
        sums = self._summed(torch.cat(flat) if flat else torch.zeros(0))
        begin = 0
        for name, state in fresh.items():
            for state_name, total in state.items():
                summed = sums[begin : begin + total.numel()].view(total.shape)
                begin += total.numel()
                dim = _SUMMED[state_name]
                count = 1 if dim is None else self._shapes[name][dim]
                self._states[name][state_name].lerp_(summed / (count * self._copies[name]), weight)
        return self._totals(names, lambda box: box.values.square().sum(), rectangles)

    def _direction(self, box: UpdatedRectangle) -> torch.Tensor:
        """Convert the gradient in place to the update; return a copy to compute with."""
        state = self._states[box.parameter]
        if "variance" in state:
            estimate = state["variance"][_place(state["variance"], box)].to(box.gradient.device)
        else:
            rows, columns = state["row_var"], state["col_var"]
            mean = rows.mean(-2, keepdim=True).clamp_(min=self._eps1)
            scaled = (rows / mean)[_place(rows, box)].to(box.gradient.device)
            estimate = scaled * columns[_place(columns, box)].to(box.gradient.device)
        box.gradient.mul_(estimate.clamp(min=self._eps1 * self._eps1).rsqrt_())
        return box.gradient.clone()

    def _totals(
        self,
        names: Sequence[str],
        measure: Callable[[UpdatedRectangle], torch.Tensor],
        rectangles: Sequence[UpdatedRectangle],
    ) -> dict[str, float]:
        """Return the results of `measure`, summed over each parameter."""
        local_sums = {name: torch.zeros((), dtype=torch.float64) for name in names}
        for box in rectangles:
            local_sums[box.parameter] += measure(box).cpu()
        stacked = torch.stack(list(local_sums.values())) if local_sums else torch.zeros(0)
        sums = self._summed(stacked)
        return {
            name: total / self._copies[name]
            for name, total in zip(names, sums.tolist(), strict=True)
        }

    def _summed(self, local_values: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks of a stage, on the CPU."""
        total = local_values.to(self._device)
        dist.all_reduce(total, group=self._group)
        return total.cpu()


RULE = Adafactor


def _place(state: torch.Tensor, rectangle: UpdatedRectangle) -> tuple[slice, ...]:
    """Return the index of the rectangle's rows, columns or elements in a state."""
    return tuple(
        slice(0, 1) if size == 1 else along
        for size, along in zip(state.shape, rectangle.box.slices, strict=True)
    )
