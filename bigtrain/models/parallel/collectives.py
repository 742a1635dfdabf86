"""Collectives with gradients over an explicit process group, for tensor and expert parallelism:
Megatron's f and g (arXiv:1909.08053, section 3) and similar functions. A tensor is *replicated* if
all ranks have equal values, and *partial* if it is the sum of the ranks' values."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from bigtrain.models.torch_patches import named_group, version_of

Group = dist.ProcessGroup
_ATTRIBUTE = "bigtrain_sum_gradient"


class RowExchange(Protocol):
    """Ranks that exchange rows, with a number of rows for each pair."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def rows(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Send the first ``sent[0]`` rows of `x` to rank 0, the next ``sent[1]`` to rank 1;
        ``received[0]`` rows of the result came from rank 0. Collective, also for a rank without
        rows."""


class GroupRows:
    """Rows exchanged over a process group. traffic: what this rank sends, while it is measured."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.traffic = Traffic()

    def rows(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """See `RowExchange`."""
        result = x.new_empty((sum(received), *x.shape[1:]))
        num_sent = sum(sent) - sent[self.rank]
        with self.traffic.exchange(num_sent * x.itemsize * math.prod(x.shape[1:]), x.device):
            dist.all_to_all_single(result, x, received, sent, group=self.group)
        return result


def summed(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum over `group`, as a new tensor. Collective. In a compiled graph one operator
    that calls this function."""
    if torch.compiler.is_compiling():
        total: torch.Tensor = sum_of_group(tensor, group.group_name)
        return total
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def gathered(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the equally large tensors of all ranks of `group`, joined along the last dimension.
    Collective. In a compiled graph one operator that calls this function."""
    if torch.compiler.is_compiling():
        joined: torch.Tensor = join_of_group(tensor, group.group_name)
        return joined
    local = tensor.contiguous()
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, local, group=group)
    return torch.cat(parts, -1)


# --- collectives as operators of compiled graphs, which name a group by a string ---


@torch.library.custom_op("bigtrain::sum_of_group", mutates_args=())
def sum_of_group(tensor: torch.Tensor, group_name: str) -> torch.Tensor:
    """Return `summed` over the group of this name. Collective."""
    return summed(tensor, named_group(group_name))


@sum_of_group.register_fake
def _sum_shape(tensor: torch.Tensor, group_name: str) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


@torch.library.custom_op("bigtrain::join_of_group", mutates_args=())
def join_of_group(tensor: torch.Tensor, group_name: str) -> torch.Tensor:
    """Return `gathered` over the group of this name. Collective."""
    return gathered(tensor, named_group(group_name))


@join_of_group.register_fake
def _join_shape(tensor: torch.Tensor, group_name: str) -> torch.Tensor:
    size = dist.get_world_size(named_group(group_name))
    return tensor.new_empty((*tensor.shape[:-1], size * tensor.shape[-1]))


# --- with gradients ---


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        if torch.compiler.is_compiling():
            # No view: torch makes views among the outputs of a graph again outside of it, without
            # this function's backward pass. Inductor writes no copy that it does not need.
            return x.clone()
        # A tensor with the memory of `x`, but no view: a view would reference `x`, which references
        # it (`sum_gradient`): a cycle through C++ that is never collected.
        memory = x.untyped_storage(), x.storage_offset(), x.shape, x.stride()
        return x.new_empty(0).set_(*memory)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return summed(gradient, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, size: int, group: Group) -> torch.Tensor:
        ctx.width, ctx.rank = x.shape[-1], dist.get_rank(group)
        return gathered(x, group)[..., :size]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        begin = ctx.rank * ctx.width
        local = gradient[..., begin : begin + ctx.width]
        missing = ctx.width - local.shape[-1]
        return torch.nn.functional.pad(local, (0, missing)) if missing else local, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, span: tuple[int, int], group: Group) -> torch.Tensor:
        ctx.size, ctx.span, ctx.group = x.shape[-1], span, group
        return x[..., span[0] : span[1]].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        full = gradient.new_zeros((*gradient.shape[:-1], ctx.size))
        full[..., ctx.span[0] : ctx.span[1]] = gradient
        return summed(full, ctx.group), None, None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, sent: list[int], received: list[int], exchange: RowExchange
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.exchange = sent, received, exchange
        return exchange.rows(x.contiguous(), sent, received)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        returned = ctx.exchange.rows(gradient.contiguous(), ctx.received, ctx.sent)
        return returned, None, None, None


def sum_gradient(x: Any, group: Group) -> Any:
    """Return the replicated tensor `x` unchanged; its backward pass sums the partial gradients of
    the group. Callers that share `x` (queries, keys and values) get one tensor, so that one
    all-reduce serves all callers."""
    if not (torch.is_tensor(x) and x.requires_grad and torch.is_grad_enabled()):
        return x
    # Stored on `x` for later callers, until `x` is written in place and has another version. While
    # torch compiles, the version is constant: it replaces writes in place by new tensors.
    version = 0 if torch.compiler.is_compiling() else version_of(x)
    stored_for, result = getattr(x, _ATTRIBUTE, (None, None))
    if stored_for != (group, version):
        result = _SumGradient.apply(x, group)  # type: ignore[no-untyped-call]
        setattr(x, _ATTRIBUTE, ((group, version), result))
    return result


def sum_partial(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum of a partial `x`, replicated."""
    result: torch.Tensor = _Sum.apply(x, group)  # type: ignore[no-untyped-call]
    return result


def gather_last(x: torch.Tensor, size: int, group: Group) -> torch.Tensor:
    """Return all ranks' equally wide slices of the last dimension, joined and truncated to
    `size`."""
    result: torch.Tensor = _Gather.apply(x, size, group)  # type: ignore[no-untyped-call]
    return result


def split_last(x: torch.Tensor, span: tuple[int, int], group: Group) -> torch.Tensor:
    """Return ``x[..., span[0]:span[1]]`` of a replicated `x`, which gets the full gradient."""
    result: torch.Tensor = _Split.apply(x, span, group)  # type: ignore[no-untyped-call]
    return result


def exchange_rows(
    x: torch.Tensor, sent: list[int], received: list[int], exchange: RowExchange
) -> torch.Tensor:
    """Return `RowExchange.rows`; the backward pass sends gradients to the ranks that sent the
    rows."""
    result: torch.Tensor = _ExchangeRows.apply(x, sent, received, exchange)  # type: ignore[no-untyped-call]
    return result


class Traffic:
    """The traffic of a rank, while it is measured. Only `seconds` waits for the device."""

    def __init__(self) -> None:
        self._is_measuring = False
        self._seconds = 0.0
        self._events: list[tuple[Any, Any]] = []
        self.sent_bytes = 0

    def begin(self, *, measuring: bool) -> None:
        """Reset the measurements; `measuring`: whether to measure from here on."""
        self._is_measuring, self.sent_bytes, self._seconds = measuring, 0, 0.0
        self._events.clear()

    @contextmanager
    def exchange(self, num_bytes: int, device: torch.device) -> Iterator[None]:
        """Wrap an exchange in which this rank sends `num_bytes` to other ranks."""
        if not self._is_measuring:
            yield
            return
        self.sent_bytes += num_bytes
        if device.type == "cuda":
            start_event, stop_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start_event.record()
            yield
            stop_event.record()
            self._events.append((start_event, stop_event))
        else:
            since = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - since

    def seconds(self) -> float:
        """Return seconds in exchanges, including waiting for other ranks; on CUDA device time, for
        which the host waits."""
        if self._events:
            _, last_stop_event = self._events[-1]
            last_stop_event.synchronize()
        on_device: float = sum(
            start_event.elapsed_time(stop_event) for start_event, stop_event in self._events
        )
        return self._seconds + on_device / 1000
