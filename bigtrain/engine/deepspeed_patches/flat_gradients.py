"""Averaged gradients of a parameter group under ZeRO 1 and 2: one flat tensor that the optimizer
reads, for a pass and summed over the passes of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from deepspeed.runtime.zero.stage_1_and_2 import GradPartitionBufferGroup

from bigtrain.engine.deepspeed_patches.reduction_plan import Slot


class FlatGradients(GradPartitionBufferGroup):  # type: ignore[misc]
    """Averaged gradients of a group: this rank's parts of parameters, 1-D views of a tensor, and
    padding last. DeepSpeed reads `flat_partition` instead of concatenating the list."""

    def __init__(self, flat: torch.Tensor, sizes: list[int]) -> None:
        list.__init__(self, flat.split(sizes))
        self.flat_partition = flat

    @property
    def _view_specs(self) -> list[tuple[int, torch.Size, bool]]:
        # Computed when it is read: DeepSpeed reads it only to move the tensor to another device.
        first = self[0].storage_offset() if self else 0
        return [(view.storage_offset() - first, view.shape, False) for view in self]


class GroupGradients:
    """Owner of the averaged gradients of parameter group number `group` on this rank.

    is_compact: DeepSpeed adds the passes of a step in one buffer; otherwise each pass has a tensor
    (`partition`), which `end_pass` adds to the tensor of earlier passes. writes_first: the first
    gradient of a step is written, instead of being added to zeros; `Slot.is_written` tells which
    parameters have a gradient.
    """

    def __init__(
        self,
        optimizer: Any,
        group: int,
        slots: Mapping[Any, Slot],
        accelerator: Any,
        *,
        writes_first: bool,
    ) -> None:
        """slots: of the parameters of all groups."""
        self.is_compact = bool(optimizer._use_compact_grad_partition_buffer(group))
        self._writes_first = writes_first
        self._optimizer, self._group = optimizer, group
        self._device = accelerator.current_device_name()
        self._slots = [slot for slot in slots.values() if slot.group == group and slot.count]
        # Elements of this rank's parts, in the order of the partition, then of the padding.
        self._num_elements = int(optimizer.partition_size[group])
        self._sizes = [slots[p].count for p in optimizer.params_in_partition[group]]
        padding = self._num_elements - sum(self._sizes)
        if padding:
            self._sizes.append(padding)
        self._partition: torch.Tensor | None = None

    @property
    def flat(self) -> torch.Tensor:
        """The gradients that the update gets, 1-D."""
        flat: torch.Tensor = self._optimizer.averaged_gradients[self._group].flat_partition
        return flat

    def partition(self) -> torch.Tensor:
        """Return this rank's part of the gradient, 1-D: of the step if `is_compact`, else of the
        pass. Elements that the pass has not written yet are undefined."""
        if self.is_compact:
            if self._optimizer.averaged_gradients.get(self._group) is None:
                self._publish(self._empty() if self._writes_first else self._empty().zero_())
                for slot in self._slots:
                    slot.is_written = False
            return self.flat
        if self._partition is None:
            self._partition = self._empty()
        return self._partition

    def end_pass(self, step: int) -> None:
        """Add the gradients of the pass number `step` to earlier passes."""
        if self.is_compact:
            return
        pass_gradient = self.partition()
        self._clear_unwritten(pass_gradient, lambda slot: slot.step == step)
        earlier_passes = self._optimizer.all_grad_tensors.get(self._group)
        if earlier_passes is None:
            self._optimizer.all_grad_tensors[self._group] = [pass_gradient]
        else:
            earlier_passes[0].add_(pass_gradient)
        self._partition = None

    def hand_over(self) -> None:
        """Give the gradients of the step to the update."""
        if self.is_compact:
            flat = self.partition()
            if self._writes_first:
                self._clear_unwritten(flat, lambda slot: slot.is_written)
        else:
            accumulated = self._optimizer.all_grad_tensors.get(self._group)
            self._publish(self._empty().zero_() if accumulated is None else accumulated[0])
        self._optimizer.all_grad_tensors[self._group] = None

    def _clear_unwritten(self, flat: torch.Tensor, is_written: Callable[[Slot], bool]) -> None:
        """Set to zero the slots of `flat` that are not written, and the padding."""
        end = 0
        for slot in self._slots:
            if not is_written(slot):
                flat.narrow(0, slot.begin, slot.count).zero_()
            end = max(end, slot.begin + slot.count)
        flat[end:].zero_()

    def _publish(self, flat: torch.Tensor) -> None:
        self._optimizer.averaged_gradients[self._group] = FlatGradients(flat, self._sizes)

    def _empty(self) -> torch.Tensor:
        dtype = self._optimizer.gradient_accumulation_dtype
        return torch.empty(self._num_elements, dtype=dtype, device=self._device)
