"""Gradient reduction of ZeRO 1 and 2: DeepSpeed's collectives and numbers in less host time.

DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py) copies each gradient into a bucket, out of it
again, and into the flat tensor that the optimizer reads. Here a bucket holds the gradients
themselves until it is full; they are then flattened by one call, reduced in the same buckets, order
and collectives, and copied into the flat tensor by a plan made once for each sequence of
parameters. So every number stays (`tests/unit/engine/deepspeed_patches/test_zero12.py`).

The gradients of a bucket stay in memory until it is flattened: ZeRO 2 without ``overlap_comm``
needs one more bucket of memory at most. With one replica there is nothing to reduce, and they are
copied once, into the flat tensor (`flat_gradients.py`).

Where the update averages (`zero12_update.py`), gradients in bfloat16 that are added up in float32
are summed at the rank that owns them instead of on all, and cast as they are flattened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
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
    is_compact = all(optimizer._use_compact_grad_partition_buffer(group) for group in groups)
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
        # Else a partition in one dtype would be added up in another.
        and (is_compact or optimizer.gradient_accumulation_dtype == optimizer.dtype)
    )
    if not is_supported:
        return False
    reduction = _Reduction(optimizer, host_time, update_averages=update_averages)
    reduction.install()
    return True


@dataclass
class _Bucket:
    """Gradients that are reduced together, of `elements` elements. producers: the streams that
    computed them."""

    slots: list[Slot] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    elements: int = 0
    producers: set[Any] = field(default_factory=set)


@dataclass(slots=True)
class _RunBuffer:
    """Where a run of a bucket is summed; is_in_place: in the partition of this rank."""

    run: OwnedRun
    buffer: torch.Tensor
    is_in_place: bool


class _Reduction:
    """Replacement of the methods of a `DeepSpeedZeroOptimizer` that `install` names."""

    def __init__(self, optimizer: Any, host_time: HostTime, *, update_averages: bool) -> None:
        self._optimizer = optimizer
        self._accelerator = get_accelerator()
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
        self._slots = dict(self._every_slot())
        groups = range(len(optimizer.bit16_groups))
        averages = optimizer.gradient_average and self._divisor != 1.0
        # Sums in float32 go where they are added up, without a flat tensor of what others own.
        self._sums_at_owners = (
            self._dtype == torch.float32
            and all(optimizer._use_compact_grad_partition_buffer(group) for group in groups)
            and (update_averages if self._world_size > 1 else not averages)
        )
        self._groups = [
            GroupGradients(
                optimizer, group, self._slots, self._accelerator, writes_first=self._sums_at_owners
            )
            for group in groups
        ]
        self._plans: dict[tuple[int, int], Any] = {}
        self._step = 1
        self._bucket = _Bucket()
        self._in_flight: torch.Tensor | None = None
        self._flush = host_time.timed(self._reduce_bucket)
        self._takes_every_pass = optimizer.partition_gradients

    def install(self) -> None:
        """Replace the hooks and the methods that they call."""
        optimizer = self._optimizer
        # DeepSpeed's handles and their order stay.
        hooked = [p for group in optimizer.bit16_groups for p in group if p.requires_grad]
        for hooked_parameter, handle in zip(hooked, optimizer._grad_acc_hooks, strict=True):
            hook = self._hook(self._slots[hooked_parameter], hooked)
            handle.hooks_dict_ref()[handle.id] = hook
        optimizer.setup_buckets = self._begin
        optimizer.reduce_ready_partitions_and_remove_grads = lambda parameter, group: self._take(
            self._slots[parameter]
        )
        optimizer.reduce_gradients = self._reduce_all
        optimizer.reduce_ipg_grads = lambda comm_dtype=None: self._flush()
        optimizer.independent_gradient_partition_epilogue = self._finish
        optimizer.finalize_gradient_accumulation_boundary = self._finish_step
        optimizer.has_overflow_partitioned_grads_serial = self._has_overflow
        # After the update the engine clears all gradients; `_take` and `_finish` have done so.
        optimizer.free_grad_in_param_list = lambda param_list: None
        if not self._keeps_sum:
            # Nothing else is to be cleared: no parameter has a `grad_accum`.
            state = optimizer._backward_hook_state
            optimizer.clear_backward_seen_flag = state.reset_for_new_step

    # --- layout ---

    def _every_slot(self) -> Iterable[tuple[nn.Parameter, Slot]]:
        """Yield every trained parameter with its slot in DeepSpeed's partitions."""
        optimizer = self._optimizer
        rank = self._rank
        for i, group in enumerate(optimizer.bit16_groups):
            begins = optimizer.grad_partition_insertion_offset[i][rank]
            offset = 0
            for parameter in group:
                number, size = optimizer.get_param_id(parameter), parameter.numel()
                owners = optimizer.param_to_partition_ids[i].get(number, [])
                starts = sorted(optimizer.grad_start_offset[i][owner][number] for owner in owners)
                ends = [*starts[1:], size]
                shares = [end - start for start, end in zip(starts, ends, strict=True)] or [size]
                slot = Slot(parameter, i, size, shares, offset=offset)
                offset += size
                if number in begins:
                    slot.start = optimizer.grad_start_offset[i][rank][number]
                    slot.begin = begins[number]
                    remaining_elements = int(optimizer.partition_size[i]) - slot.begin
                    slot.count = min(size - slot.start, remaining_elements)
                yield parameter, slot

    # --- during the backward pass ---

    def _hook(self, slot: Slot, hooked: list[nn.Parameter]) -> Callable[[torch.Tensor], None]:
        """Return the hook for the complete gradient of `slot`, as DeepSpeed's
        `create_gradient_handling_hooks` makes it, with a short path: the first hook of a backward
        pass calls DeepSpeed's code, which queues the end of the pass; later hooks only have the
        gradient to handle and the count of hooks to advance."""
        optimizer, state = self._optimizer, self._optimizer._backward_hook_state
        keeps_sum, put_into_bucket = self._keeps_sum, self._take
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
                    put_into_bucket(slot)
                state.hooks_fired_this_backward = num_fired + 1
                remaining = state.max_expected_hooks_seen - num_fired - 1
                state.remaining_grad_acc_hooks = remaining if remaining > 0 else 0
                return
            # Asked before the calls below, as in DeepSpeed.
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

    def _take(self, slot: Slot) -> None:
        """Put a gradient into the bucket (`reduce_independent_p_g_buckets_and_remove_grads`); under
        ZeRO 1 at the last micro-batch of a step only."""
        size, parameter = slot.size, slot.parameter
        is_due = self._takes_every_pass or self._optimizer._is_gradient_accumulation_boundary
        if not size or not is_due:
            return
        limit = self._optimizer.reduce_bucket_size
        if self._bucket.elements + size > limit:
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
        bucket.elements += size
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
                    self._take(slot)
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
        # The stream that reduces waits for the streams that computed the gradients, of which
        # compiled models have several, and their memory for it.
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
            self._groups[t.group].partition().narrow(0, t.begin, t.count) for t in plan.targets
        ]
        # A single rank without averaging: partitions get exactly these gradients.
        if (
            side is None
            and self._world_size == 1
            and not (self._optimizer.gradient_average and self._divisor != 1.0)
            and not any(self._groups[target.group].is_compact for target in plan.targets)
            and self._dtype == self._optimizer.gradient_accumulation_dtype
            and all(g.dtype == self._dtype and g.is_contiguous() for g in gradients)
        ):
            for target, view in zip(plan.targets, views, strict=True):
                torch.cat([gradients[number].view(-1) for number in target.slots], out=view)
            return
        # Otherwise one flat tensor is reduced and copied into partitions.
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
        """Return the plan that `make` makes of `slots`, made once."""
        key = (id(slots[0]), len(slots))
        plan = self._plans.get(key)
        if plan is None or plan.slots != slots:
            plan = self._plans[key] = make(slots, size)
        return plan

    def _add_to_partitions(self, bucket: _Bucket) -> None:
        """Add the gradients of the only replica to the sums of the step, or write the first."""
        for slot, gradient in zip(bucket.slots, bucket.gradients, strict=True):
            sums = self._groups[slot.group].partition().narrow(0, slot.begin, slot.count)
            if slot.is_written:
                sums.add_(gradient.reshape(-1))
            else:
                # Zero is added as to a sum that begins with it: it has no sign then.
                torch.add(gradient.reshape(-1), 0.0, out=sums)
            slot.is_written = True

    def _sum_at_owners(self, bucket: _Bucket, current: Any) -> None:
        """Sum the gradients in the bucket over the replicas, each at the rank that owns it, and add
        what this rank owns to earlier passes. Collective over replicas. current: the stream that
        has the gradients, None if there is only one."""
        slots, gradients = bucket.slots, [gradient.reshape(-1) for gradient in bucket.gradients]
        partitions = [group.partition() for group in self._groups]
        sizes = [partition.numel() for partition in partitions]
        plan: OwnerPlan = self._plan_of(slots, owner_plan_of, sizes)
        # A run of which nothing is written yet in this step is summed in the partition itself.
        scratch = torch.empty(bucket.elements, dtype=self._dtype, device=gradients[0].device)
        placed, offset = [], 0
        for run in plan.runs:
            is_in_place = run.owner == self._rank and not any(
                slots[piece.number].is_written for piece in run.pieces
            )
            source, begin = (partitions[run.group], run.begin) if is_in_place else (scratch, offset)
            placed.append(_RunBuffer(run, source.narrow(0, begin, run.count), is_in_place))
            offset += run.count
        # One call copies the gradients into the buffers of the runs, and casts the gradients.
        parts = [
            part
            for placed_run in placed
            for part in placed_run.buffer.split([piece.count for piece in placed_run.run.pieces])
        ]
        pieces = [piece for run in plan.runs for piece in run.pieces]
        torch._foreach_copy_(
            parts, [gradients[p.number].narrow(0, p.start, p.count) for p in pieces]
        )
        bucket.gradients.clear()
        side = self._side_stream
        if side is None:
            self._reduce_runs(placed, slots)
            return
        side.wait_stream(current)
        with self._accelerator.stream(side):
            self._reduce_runs(placed, slots)
        self._in_flight = scratch  # until the stream it was allocated on has waited for this one

    def _reduce_runs(self, placed: list[_RunBuffer], slots: list[Slot]) -> None:
        """Sum each run at its owner, and what this rank owns into its partitions."""
        for placed_run in placed:
            run = placed_run.run
            dist.reduce(
                placed_run.buffer, group=self._optimizer.dp_process_group, group_dst=run.owner
            )
            if run.owner != self._rank:
                continue
            if not placed_run.is_in_place:
                counts = [piece.count for piece in run.pieces]
                sums = self._groups[run.group].partition().narrow(0, run.begin, run.count)
                for piece, earlier, new in zip(
                    run.pieces, sums.split(counts), placed_run.buffer.split(counts), strict=True
                ):
                    if slots[piece.number].is_written:
                        earlier.add_(new)
                    else:
                        earlier.copy_(new)
            for piece in run.pieces:
                slots[piece.number].is_written = True

    def _reduce(self, flat: torch.Tensor, plan: ReductionPlan, views: list[torch.Tensor]) -> None:
        optimizer = self._optimizer
        if optimizer.gradient_average and self._divisor != 1.0:
            flat.div_(self._divisor)
        reduced = flat if flat.dtype == self._dtype else flat.to(self._dtype)
        if self._world_size > 1:
            for part in reduced.split(plan.reduced):
                comm.all_reduce(part, group=optimizer.dp_process_group)
        # Copy what this rank owns into its partitions, or add it to earlier passes.
        pieces = reduced.split(plan.pieces)
        for target, view in zip(plan.targets, views, strict=True):
            owned = [pieces[number] for number in target.pieces]
            # A compact group has one buffer for all passes of a step.
            adds = self._groups[target.group].is_compact
            if len(owned) > 1 and not adds and reduced.dtype == view.dtype:
                torch.cat(owned, out=view)
                continue
            source = owned[0] if len(owned) == 1 else torch.cat(owned)
            view.add_(source) if adds else view.copy_(source)

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
        """Return whether a gradient of this rank is not finite: [1], bool. Reads each group once.
        DeepSpeed looks at each gradient (`has_overflow_partitioned_grads_serial`)."""
        optimizer = self._optimizer
        count = torch.zeros(1, dtype=torch.float, device=self._accelerator.current_device_name())
        for group in self._groups:
            count += optimizer._has_inf_or_nan(group.flat)
        return count.bool()
