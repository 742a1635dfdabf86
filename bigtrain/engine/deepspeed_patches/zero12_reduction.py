"""Gradient reduction of ZeRO 1 and 2: DeepSpeed's collectives and numbers in less host time.

DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py) copies each gradient into a bucket, from the bucket
into a separate tensor, and into the flat tensor that the optimizer reads. Here a bucket holds the
gradients themselves until it is full; they are then flattened by one call, reduced with DeepSpeed's
buckets, order and collectives, and copied into the flat tensor by a plan made once for each
sequence of parameters. No number changes (`tests/unit/engine/deepspeed_patches/test_zero12.py`).

The gradients of a bucket stay in memory until it is flattened: ZeRO 2 without ``overlap_comm``
needs one more bucket of memory at most. With one replica there is nothing to reduce: gradients are
copied once, into the flat tensor (`flat_gradients.py`).

If the update averages over replicas (`zero12_update.py`), gradients in bfloat16 that are added up
in float32 are summed at the rank that owns them instead of on all ranks, and cast as they are
flattened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.torch_autocast import is_autocast_initialized
from deepspeed.runtime.zero import stage_1_and_2
from torch import nn
from torch._utils import _flatten_dense_tensors

from bigtrain.engine.deepspeed_patches.flat_gradients import GroupGradients
from bigtrain.engine.deepspeed_patches.host_time import HostTime
from bigtrain.engine.deepspeed_patches.reduction_plan import (
    OwnedRun,
    OwnerPlan,
    ReductionPlan,
    Slot,
    owner_plan_of,
    plan_of,
)


def replace_reduction(
    optimizer: Any, host_time: HostTime, *, update_averages: bool = False
) -> bool:
    """Make `optimizer`, of ZeRO 1 or 2, reduce its gradients by a plan; return False if it cannot:
    with several process groups (experts) or dtypes, offloading, ZenFlow, padding between
    parameters, round robin, or gradients that are not contiguous. `host_time` counts the
    reductions. update_averages: whether the update divides sums over replicas.

    Price with one replica: DeepSpeed makes two more copies, 2 x 2 x 16.1 GB / 2.88 TB/s = 22 ms, 7%
    of 300 ms (8 replicas: 1/8 of one, 1 ms). Host time, 0.031 ms less per tensor: 9 ms, 3%.
    """
    parameters = [p for group in optimizer.bit16_groups for p in group]
    num_hooked = sum(p.requires_grad for p in parameters)
    groups = range(len(optimizer.bit16_groups))
    are_compact = all(optimizer._use_compact_grad_partition_buffer(group) for group in groups)
    is_supported = (
        optimizer.contiguous_gradients
        and optimizer.reduce_scatter
        and optimizer.use_multi_rank_bucket_allreduce
        and not optimizer.cpu_offload
        and not optimizer.zenflow
        and not optimizer.has_moe_layers
        and not optimizer.round_robin_gradients
        and optimizer.autoep_folding_tp_group is None
        and len(optimizer._grad_acc_hooks) == num_hooked
        and not is_autocast_initialized()
        and not any(map(any, optimizer.round_robin_bit16_padding))
        and all(group is optimizer.dp_process_group for group in optimizer.real_dp_process_group)
        and all(p.dtype == optimizer.dtype and not hasattr(p, "use_muon") for p in parameters)
        # Otherwise partitions in one dtype would be added up in another dtype.
        and (are_compact or optimizer.gradient_accumulation_dtype == optimizer.dtype)
    )
    if not is_supported:
        return False
    reduction = _Reduction(optimizer, host_time, update_averages=update_averages)
    reduction.install()
    return True


@dataclass
class _Bucket:
    """Gradients that are reduced together, with `num_elements` elements. producers: the streams
    that computed the gradients."""

    slots: list[Slot] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    num_elements: int = 0
    producers: set[Any] = field(default_factory=set)


@dataclass(slots=True)
class _RunBuffer:
    """Tensor in which a run of a bucket is summed. is_in_place: whether it is a view of this rank's
    partition."""

    run: OwnedRun
    buffer: torch.Tensor
    is_in_place: bool


class _Reduction:
    """Replacement of the methods of a `DeepSpeedZeroOptimizer` that `install` names."""

    def __init__(self, optimizer: Any, host_time: HostTime, *, update_averages: bool) -> None:
        self._optimizer = optimizer
        self._accelerator = get_accelerator()
        # Whether micro-batches are added up in the attribute `grad_accum` of parameters.
        self._keeps_sum = optimizer.use_grad_accum_attribute
        self._world_size = comm.get_world_size(group=optimizer.dp_process_group)
        self._rank = comm.get_rank(group=optimizer.dp_process_group)
        self._divisor = self._world_size / float(optimizer.sequence_parallel_size)
        self._dtype = optimizer.communication_data_type
        if optimizer.sequence_parallel_size > 1:
            self._dtype = torch.float32
        self._is_asynchronous = not self._accelerator.resolves_data_dependency()
        overlaps = optimizer.overlap_comm and self._is_asynchronous
        self._side_stream = optimizer.reduction_stream if overlaps else None
        self._slots = dict(self._slots_by_parameter())
        groups = range(len(optimizer.bit16_groups))
        self._averages = optimizer.gradient_average and self._divisor != 1.0
        # Whether gradients are summed, in float32, directly in the owner's partition. Then
        # this class does not divide them: the update does, or they need no division.
        divides_elsewhere = update_averages if self._world_size > 1 else not self._averages
        self._sums_at_owners = (
            self._dtype == torch.float32
            and all(optimizer._use_compact_grad_partition_buffer(group) for group in groups)
            and divides_elsewhere
        )
        self._groups = [
            GroupGradients(
                optimizer, group, self._slots, self._accelerator, writes_first=self._sums_at_owners
            )
            for group in groups
        ]
        self._plans: dict[tuple[int, int], Any] = {}  # see `_plan_of`
        self._step = 1  # number of the pass
        self._bucket = _Bucket()
        self._in_flight: torch.Tensor | None = None  # flat tensor that the side stream reads
        self._flush = host_time.timed(self._reduce_bucket)
        self._reduces_every_pass = optimizer.partition_gradients  # ZeRO 2

    def install(self) -> None:
        """Replace the hooks and the methods that they call."""
        optimizer = self._optimizer
        # Replace the functions of DeepSpeed's hooks, and keep the handles and the order.
        hooked = [p for group in optimizer.bit16_groups for p in group if p.requires_grad]
        for hooked_parameter, handle in zip(hooked, optimizer._grad_acc_hooks, strict=True):
            hook = self._hook(self._slots[hooked_parameter], hooked)
            handle.hooks_dict_ref()[handle.id] = hook
        optimizer.setup_buckets = self._begin
        optimizer.reduce_ready_partitions_and_remove_grads = self._add_parameter
        optimizer.reduce_gradients = self._reduce_all
        optimizer.reduce_ipg_grads = lambda comm_dtype=None: self._flush()
        optimizer.independent_gradient_partition_epilogue = self._finish
        optimizer.finalize_gradient_accumulation_boundary = self._finish_step
        optimizer.has_overflow_partitioned_grads_serial = self._has_overflow
        # After the update the engine would clear all gradients: they are cleared when they are
        # added to a bucket.
        optimizer.free_grad_in_param_list = lambda param_list: None
        if not self._keeps_sum:
            # Do not visit parameters: none has a `grad_accum` to clear.
            state = optimizer._backward_hook_state
            optimizer.clear_backward_seen_flag = state.reset_for_new_step

    # --- layout ---

    def _slots_by_parameter(self) -> Iterable[tuple[nn.Parameter, Slot]]:
        """Yield every trained parameter with its slot in DeepSpeed's partitions."""
        optimizer, rank = self._optimizer, self._rank
        for group_index, group in enumerate(optimizer.bit16_groups):
            # By parameter id: the owners, the first element of an owner, and where this rank's
            # elements begin in the partition.
            owners_by_id = optimizer.param_to_partition_ids[group_index]
            starts_by_rank = optimizer.grad_start_offset[group_index]
            begins = optimizer.grad_partition_insertion_offset[group_index][rank]
            offset = 0
            for parameter in group:
                number, size = optimizer.get_param_id(parameter), parameter.numel()
                owners = owners_by_id.get(number, [])
                starts = sorted(starts_by_rank[owner][number] for owner in owners) or [0]
                shares = [end - start for start, end in pairwise([*starts, size])]
                slot = Slot(parameter, group_index, size, shares, offset=offset)
                offset += size
                if number in begins:
                    slot.start = starts_by_rank[rank][number]
                    slot.begin = begins[number]
                    remaining_elements = int(optimizer.partition_size[group_index]) - slot.begin
                    slot.count = min(size - slot.start, remaining_elements)
                yield parameter, slot

    # --- during the backward pass ---

    def _hook(self, slot: Slot, hooked: list[nn.Parameter]) -> Callable[[torch.Tensor], None]:
        """Return the hook for the complete gradient of `slot`. The first hook of a backward pass
        does what DeepSpeed's does (`create_gradient_handling_hooks`), which queues the end of the
        pass; later hooks only handle the gradient and advance the count of hooks."""
        optimizer, state = self._optimizer, self._optimizer._backward_hook_state
        keeps_sum, add_to_bucket = self._keeps_sum, self._add_to_bucket
        # As in DeepSpeed's `process_gradients`; otherwise the end of the pass reduces.
        reduces_in_hooks = optimizer.partition_gradients or optimizer.overlap_comm
        parameter: Any = slot.parameter
        group, accumulation_dtype = slot.group, optimizer.gradient_accumulation_dtype

        def hook(_parameter: torch.Tensor) -> None:
            num_fired = state.hooks_fired_this_backward
            is_later_hook = (
                num_fired and state.post_backward_callback_queued and state.backward_active_depth
            )
            if (
                is_later_hook
                and optimizer.ready_for_gradients
                and not optimizer._coalesce_grad_reduction
            ):
                # Add the gradient to the sum over micro-batches, as DeepSpeed's
                # `_fill_param_grad_accum_attribute`.
                if keeps_sum and parameter.grad is not None:
                    if parameter.grad_accum is None:
                        parameter.grad_accum = parameter.grad.to(accumulation_dtype)
                    else:
                        parameter.grad_accum.add_(parameter.grad)
                    parameter.grad = None
                if reduces_in_hooks:
                    add_to_bucket(slot)
                state.hooks_fired_this_backward = num_fired + 1
                remaining = state.max_expected_hooks_seen - num_fired - 1
                state.remaining_grad_acc_hooks = remaining if remaining > 0 else 0
                return
            # Read before the calls below change it, as in DeepSpeed.
            refreshes_count = optimizer.should_refresh_expected_hook_count()
            optimizer.reenter_backward_if_needed()
            optimizer.process_gradients(parameter, group)
            expected = optimizer._max_expected_hooks_seen
            if refreshes_count:
                expected = stage_1_and_2.count_used_parameters_in_backward(hooked)
            optimizer.update_hook_state_and_maybe_run_epilogue(expected)

        return hook

    def _begin(self) -> None:
        """Handle the first gradient of a pass (`setup_buckets`, without buckets to allocate)."""
        if not self._optimizer.ready_for_gradients:
            self._optimizer.micro_step_id += 1
            self._optimizer.ready_for_gradients = True

    def _add_parameter(self, parameter: nn.Parameter, _group: int) -> None:
        """Replace `reduce_ready_partitions_and_remove_grads`."""
        self._add_to_bucket(self._slots[parameter])

    def _add_to_bucket(self, slot: Slot) -> None:
        """Put a gradient into the bucket (`reduce_independent_p_g_buckets_and_remove_grads`); under
        ZeRO 1 at the last micro-batch of a step only."""
        size, parameter = slot.size, slot.parameter
        is_due = self._reduces_every_pass or self._optimizer._is_gradient_accumulation_boundary
        if size == 0 or not is_due:
            return
        limit = self._optimizer.reduce_bucket_size
        if self._bucket.num_elements + size > limit:
            self._flush()
        if not getattr(parameter, "ds_grad_is_ready", True):
            return
        assert slot.step != self._step, "the gradient of a parameter is computed twice in one pass"
        slot.step = self._step
        if self._keeps_sum:
            gradient, parameter.grad_accum = parameter.grad_accum, None
        else:
            gradient, parameter.grad = parameter.grad, None
        bucket = self._bucket
        bucket.slots.append(slot)
        bucket.gradients.append(gradient)
        bucket.num_elements += size
        if self._is_asynchronous:
            bucket.producers.add(self._accelerator.current_stream())

    # --- reduction ---

    def _reduce_all(self, pipeline_parallel: bool = False) -> None:
        """Reduce all gradients of ZeRO 1 after the last micro-batch of a step
        (`reduce_gradients`)."""
        optimizer = self._optimizer
        if not optimizer.overlap_comm:
            for slot in self._slots.values():
                parameter = slot.parameter
                gradient = parameter.grad_accum if self._keeps_sum else parameter.grad
                if gradient is not None:
                    self._add_to_bucket(slot)
        optimizer.overlapping_partition_gradients_reduce_epilogue()

    def _reduce_bucket(self) -> None:
        """Average and reduce the gradients in the bucket (`reduce_ipg_grads`). Collective over
        replicas. Under ``overlap_comm`` a side stream reduces: it waits for the gradients, and the
        stream of the backward pass waits for the previous bucket, as with DeepSpeed's two
        buffers."""
        bucket, self._bucket = self._bucket, _Bucket()
        slots, gradients = bucket.slots, bucket.gradients
        if not slots:
            return
        # The current stream waits for the streams that computed the gradients (compiled models have
        # several), and the allocator keeps the gradients until the current stream has read them.
        side = self._side_stream
        current = self._accelerator.current_stream() if self._is_asynchronous else None
        if current is not None:
            other_streams = bucket.producers - {current}
            for stream in other_streams:
                current.wait_stream(stream)
            if other_streams:
                for gradient in bucket.gradients:
                    gradient.record_stream(current)
        if self._sums_at_owners and self._world_size == 1:
            self._add_to_partitions(bucket)
            return
        if current is not None and side is not None:
            current.wait_stream(side)
            self._in_flight = None
        if self._sums_at_owners:
            self._sum_at_owners(bucket, current)
            return
        plan: ReductionPlan = self._plan_of(slots, plan_of, self._optimizer.reduce_bucket_size)
        views = [
            self._groups[target.group].partition().narrow(0, target.begin, target.count)
            for target in plan.targets
        ]
        # Without reduction, division, addition and cast, copy the gradients into the partitions.
        copies_only = (
            side is None
            and self._world_size == 1
            and not self._averages
            and not any(self._groups[target.group].is_compact for target in plan.targets)
            and self._dtype == self._optimizer.gradient_accumulation_dtype
            and all(g.dtype == self._dtype and g.is_contiguous() for g in gradients)
        )
        if copies_only:
            for target, view in zip(plan.targets, views, strict=True):
                torch.cat([gradients[number].view(-1) for number in target.slots], out=view)
            return
        # Otherwise reduce one flat tensor, and copy it into the partitions.
        flat = _flatten_dense_tensors(gradients)
        bucket.gradients.clear()
        if side is None:
            self._reduce(flat, plan, views)
            return
        side.wait_stream(current)
        with self._accelerator.stream(side):
            self._reduce(flat, plan, views)
        self._in_flight = flat  # until the stream it was allocated on has waited for this one

    def _plan_of(self, slots: list[Slot], make: Callable[[list[Slot], Any], Any], size: Any) -> Any:
        """Return the result of `make` for `slots` and `size`, computed once for each sequence of
        slots."""
        key = (id(slots[0]), len(slots))
        plan = self._plans.get(key)
        if plan is None or plan.slots != slots:
            plan = self._plans[key] = make(slots, size)
        return plan

    def _add_to_partitions(self, bucket: _Bucket) -> None:
        """Add the gradients of the only replica to the sums of the step; write the first ones."""
        for slot, gradient in zip(bucket.slots, bucket.gradients, strict=True):
            sums = self._groups[slot.group].partition().narrow(0, slot.begin, slot.count)
            if slot.is_written:
                sums.add_(gradient.reshape(-1))
            else:
                # Equal to an addition to a sum of +0.0, which turns -0.0 into +0.0.
                torch.add(gradient.reshape(-1), 0.0, out=sums)
            slot.is_written = True

    def _sum_at_owners(self, bucket: _Bucket, current: Any) -> None:
        """Sum the gradients in the bucket over the replicas, each at the rank that owns it, and add
        the gradients that this rank owns to earlier passes. Collective over replicas. current: the
        stream that has the gradients, None if there is only one."""
        slots, gradients = bucket.slots, [gradient.reshape(-1) for gradient in bucket.gradients]
        partitions = [group.partition() for group in self._groups]
        partition_sizes = [partition.numel() for partition in partitions]
        plan: OwnerPlan = self._plan_of(slots, owner_plan_of, partition_sizes)
        # A run without a gradient in this step so far is summed in the partition itself.
        scratch = torch.empty(bucket.num_elements, dtype=self._dtype, device=gradients[0].device)
        run_buffers, offset = [], 0
        for run in plan.runs:
            has_earlier = any(slots[piece.number].is_written for piece in run.pieces)
            is_in_place = run.owner == self._rank and not has_earlier
            if is_in_place:
                buffer = partitions[run.group].narrow(0, run.begin, run.count)
            else:
                buffer = scratch.narrow(0, offset, run.count)
            run_buffers.append(_RunBuffer(run, buffer, is_in_place))
            offset += run.count
        # One call copies the gradients into the buffers, and casts them.
        targets: list[torch.Tensor] = []
        for run_buffer in run_buffers:
            targets += run_buffer.buffer.split([piece.count for piece in run_buffer.run.pieces])
        pieces = [piece for run in plan.runs for piece in run.pieces]
        sources = [gradients[p.number].narrow(0, p.start, p.count) for p in pieces]
        torch._foreach_copy_(targets, sources)
        bucket.gradients.clear()
        side = self._side_stream
        if side is None:
            self._reduce_runs(run_buffers, slots)
            return
        side.wait_stream(current)
        with self._accelerator.stream(side):
            self._reduce_runs(run_buffers, slots)
        self._in_flight = scratch  # until the stream it was allocated on has waited for this one

    def _reduce_runs(self, run_buffers: list[_RunBuffer], slots: list[Slot]) -> None:
        """Sum each run at its owner, and add the runs that this rank owns to its partitions."""
        for run_buffer in run_buffers:
            run = run_buffer.run
            dist.reduce(
                run_buffer.buffer, group=self._optimizer.dp_process_group, group_dst=run.owner
            )
            if run.owner != self._rank:
                continue
            if not run_buffer.is_in_place:
                counts = [piece.count for piece in run.pieces]
                sums = self._groups[run.group].partition().narrow(0, run.begin, run.count)
                for piece, earlier_sum, summed in zip(
                    run.pieces, sums.split(counts), run_buffer.buffer.split(counts), strict=True
                ):
                    if slots[piece.number].is_written:
                        earlier_sum.add_(summed)
                    else:
                        earlier_sum.copy_(summed)
            for piece in run.pieces:
                slots[piece.number].is_written = True

    def _reduce(self, flat: torch.Tensor, plan: ReductionPlan, views: list[torch.Tensor]) -> None:
        """Average and reduce the flat gradients of a bucket, and write this rank's elements to
        `views`, the ranges of partitions of the plan's targets. Collective over replicas."""
        optimizer = self._optimizer
        if self._averages:
            flat.div_(self._divisor)
        reduced = flat if flat.dtype == self._dtype else flat.to(self._dtype)
        if self._world_size > 1:
            for part in reduced.split(plan.reduced):
                comm.all_reduce(part, group=optimizer.dp_process_group)
        pieces = reduced.split(plan.pieces)
        for target, view in zip(plan.targets, views, strict=True):
            owned = [pieces[number] for number in target.pieces]
            # A compact group has one buffer for all passes of a step: add to earlier passes.
            is_added = self._groups[target.group].is_compact
            if len(owned) > 1 and not is_added and reduced.dtype == view.dtype:
                torch.cat(owned, out=view)
                continue
            source = owned[0] if len(owned) == 1 else torch.cat(owned)
            if is_added:
                view.add_(source)
            else:
                view.copy_(source)

    # --- after the backward pass ---

    def _finish(self) -> None:
        """Reduce the last bucket and add the gradients of this pass to earlier passes. Collective
        over replicas. DeepSpeed's `independent_gradient_partition_epilogue`."""
        optimizer = self._optimizer
        self._flush()
        if self._side_stream is not None:
            self._accelerator.synchronize()
            self._in_flight = None
        is_boundary = optimizer.is_gradient_accumulation_boundary()
        for group in self._groups:
            group.end_pass(self._step)
            if is_boundary:
                group.hand_over()
        self._step += 1
        optimizer._release_ipg_buffers()
        optimizer._clear_param_grad_only()
        optimizer._epilogue_ran_this_backward = True

    def _finish_step(self) -> None:
        """End a step whose last pass set no boundary
        (`finalize_gradient_accumulation_boundary`)."""
        self._optimizer.set_gradient_accumulation_boundary(True)
        for group in self._groups:
            group.hand_over()

    def _has_overflow(self) -> torch.Tensor:
        """Return whether a gradient of this rank is not finite: [1], bool. Reads each group at
        once; DeepSpeed reads each gradient (`has_overflow_partitioned_grads_serial`)."""
        optimizer, device = self._optimizer, self._accelerator.current_device_name()
        num_overflowed = torch.zeros(1, dtype=torch.float, device=device)
        for group in self._groups:
            num_overflowed += optimizer._has_inf_or_nan(group.flat)
        return num_overflowed.bool()
