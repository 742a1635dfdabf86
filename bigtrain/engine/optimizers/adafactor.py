"""Adafactor (Shazeer and Stern 2018, arXiv 1804.04235), as `torch.optim.Adafactor` (torch 2.13,
torch/optim/_adafactor.py), for parameters sharded by ZeRO and the parallel degrees.

The second moment of a matrix is a number per row and per column, and the step size depends on the
root mean square of the full parameter. Both are sums over elements, which are completed by an
all-reduce of rows + columns numbers and an all-reduce of a number per parameter. So every rank has
all states.
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
_MEAN_DIM = {"row_var": -1, "col_var": -2, "variance": None}
"""Dimension over which each state is the mean of squared gradients; None: no mean."""


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
        self._num_holders: dict[str, float] = {}
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
        totals = self._summed(torch.tensor(list(num_elements.values()), dtype=torch.float64))
        # The number of ranks that hold an element is equal for all elements of a parameter.
        self._num_holders = {
            name: total / math.prod(self._shapes[name])
            for name, total in zip(num_elements, totals.tolist(), strict=True)
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
        square_sums = self._update_moments(names, rectangles, step**self._section.beta2_decay)
        update_square_sums = self._sums_by_name(
            names, lambda rectangle: self._to_update(rectangle).square_().sum(), rectangles
        )
        # alpha = max(eps2, RMS(X)) rho, and the update is divided by max(1, RMS(U) / d), with
        # RMS(X) = norm of X / sqrt(number of elements).
        lr, decay = group["lr"], group["weight_decay"]
        rho = min(lr, 1 / math.sqrt(step))
        for rectangle in rectangles:
            root_size = math.sqrt(math.prod(self._shapes[rectangle.parameter]))
            norm = math.sqrt(square_sums[rectangle.parameter])
            alpha = rho * max(self._section.eps2, norm / root_size)
            update_norm = math.sqrt(update_square_sums[rectangle.parameter])
            denominator = max(1.0, update_norm / (root_size * self._section.clip_threshold))
            rectangle.values.mul_(1 - lr * decay)
            rectangle.values.add_(rectangle.gradient, alpha=-alpha / denominator)

    def _new_state(self, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
        if len(shape) == 1:
            return {"variance": torch.zeros(shape)}
        return {
            "row_var": torch.zeros(*shape[:-1], 1),
            "col_var": torch.zeros(*shape[:-2], 1, shape[-1]),
        }

    def _update_moments(
        self, names: Sequence[str], rectangles: Sequence[UpdatedRectangle], weight: float
    ) -> dict[str, float]:
        """Update the second moments with `weight`; return the sum of the squared values of each
        parameter. Collective."""
        # Sum the squared gradients of this rank, then of all ranks in one flat tensor.
        square_sums = {name: self._new_state(self._shapes[name]) for name in names}
        for rectangle in rectangles:
            squares = rectangle.gradient.square()
            for state_name, sums in square_sums[rectangle.parameter].items():
                dim = _MEAN_DIM[state_name]
                summed = squares if dim is None else squares.sum(dim, keepdim=True)
                sums[_state_index(sums, rectangle)] += summed.cpu()
        flat = [sums.view(-1) for state in square_sums.values() for sums in state.values()]
        flat_totals = self._summed(torch.cat(flat) if flat else torch.zeros(0))
        # V <- V + weight (mean of G^2 - V)
        begin = 0
        for name, state in square_sums.items():
            for state_name, sums in state.items():
                totals = flat_totals[begin : begin + sums.numel()].view(sums.shape)
                begin += sums.numel()
                dim = _MEAN_DIM[state_name]
                count = 1 if dim is None else self._shapes[name][dim]
                mean = totals / (count * self._num_holders[name])
                self._states[name][state_name].lerp_(mean, weight)
        return self._sums_by_name(
            names, lambda rectangle: rectangle.values.square().sum(), rectangles
        )

    def _to_update(self, rectangle: UpdatedRectangle) -> torch.Tensor:
        """Convert the gradient in place to the update U = G / sqrt(V); return a copy."""
        state, device = self._states[rectangle.parameter], rectangle.gradient.device
        if "variance" in state:
            variance = state["variance"]
            estimate = variance[_state_index(variance, rectangle)].to(device)
        else:
            # V = (row means) (column means)^T / mean of the row means
            rows, columns = state["row_var"], state["col_var"]
            mean = rows.mean(-2, keepdim=True).clamp_(min=self._eps1)
            scaled_rows = (rows / mean)[_state_index(rows, rectangle)].to(device)
            estimate = scaled_rows * columns[_state_index(columns, rectangle)].to(device)
        rectangle.gradient.mul_(estimate.clamp(min=self._eps1 * self._eps1).rsqrt_())
        return rectangle.gradient.clone()

    def _sums_by_name(
        self,
        names: Sequence[str],
        measure: Callable[[UpdatedRectangle], torch.Tensor],
        rectangles: Sequence[UpdatedRectangle],
    ) -> dict[str, float]:
        """Return the results of `measure`, summed over each parameter. Collective."""
        local_sums = {name: torch.zeros((), dtype=torch.float64) for name in names}
        for rectangle in rectangles:
            local_sums[rectangle.parameter] += measure(rectangle).cpu()
        stacked = torch.stack(list(local_sums.values())) if local_sums else torch.zeros(0)
        sums = self._summed(stacked)
        return {
            name: total / self._num_holders[name]
            for name, total in zip(names, sums.tolist(), strict=True)
        }

    def _summed(self, local_values: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks of a stage, on the CPU."""
        total = local_values.to(self._device)
        dist.all_reduce(total, group=self._group)
        return total.cpu()


RULE = Adafactor


def _state_index(state: torch.Tensor, rectangle: UpdatedRectangle) -> tuple[slice, ...]:
    """Return the index of the rectangle's rows, columns or elements in a state."""
    return tuple(
        slice(0, 1) if size == 1 else dim_slice
        for size, dim_slice in zip(state.shape, rectangle.box.slices, strict=True)
    )
