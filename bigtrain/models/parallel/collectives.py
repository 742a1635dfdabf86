"""Collectives with gradients, over an explicit process group: what tensor and expert parallelism
are made of.

Megatron's f and g (arXiv:1909.08053, section 3) and their relatives. A tensor is *replicated* if
every rank has the same values and *partial* if the processes' values are to be added up.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
import torch.distributed as dist

from bigtrain.models.parallel.traffic import Traffic
from bigtrain.models.torch_patches import version_of

Group = dist.ProcessGroup
_ATTRIBUTE = "bigtrain_sum_gradient"


class RowExchange(Protocol):
    """Ranks that send each other rows, to each as many as there are for it."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def rows(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Send the first ``sent[0]`` rows of `x` to rank 0 and so on; ``received[0]`` rows of the
        result came from rank 0, and so on. Collective, also for who has no rows."""


class GroupRows:
    """Rows exchanged over a process group. traffic: what this rank sends, where it is measured."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.traffic = Traffic()

    def rows(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """See `RowExchange`."""
        result = x.new_empty((sum(received), *x.shape[1:]))
        others = sum(sent) - sent[self.rank]
        with self.traffic.exchange(others * x.itemsize * math.prod(x.shape[1:]), x.device):
            dist.all_to_all_single(result, x, received, sent, group=self.group)
        return result


def summed(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum over `group`, as a new tensor. Collective."""
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        # The same memory, and no view: a view would hold `x`, which holds it (`sum_gradient`), in a
        # circle through C++ that no collector sees.
        same = x.untyped_storage(), x.storage_offset(), x.shape, x.stride()
        return x.new_empty(0).set_(*same)

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
        own = x.contiguous()
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own, group=group)
        return torch.cat(parts, -1)[..., :size]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        begin = ctx.rank * ctx.width
        own = gradient[..., begin : begin + ctx.width]
        missing = ctx.width - own.shape[-1]
        return torch.nn.functional.pad(own, (0, missing)) if missing else own, None, None


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
        back = ctx.exchange.rows(gradient.contiguous(), ctx.received, ctx.sent)
        return back, None, None, None


# `apply` has no annotations.
_sum_gradient: Any = _SumGradient.apply
_sum: Any = _Sum.apply
_gather: Any = _Gather.apply
_split: Any = _Split.apply
_exchange_rows: Any = _ExchangeRows.apply


def sum_gradient(x: Any, group: Group) -> Any:
    """A replicated `x` as it is; its gradient, partial in every rank, is summed.

    Once for all who ask for the same `x`, as queries, keys and values do: what they get is one
    tensor, where their gradients come together before they are exchanged.
    """
    if not (torch.is_tensor(x) and x.requires_grad and torch.is_grad_enabled()):
        return x
    asked: Any = getattr(x, _ATTRIBUTE, None)
    version = version_of(x)
    if asked is None or asked[:2] != (group, version):
        asked = (group, version, _sum_gradient(x, group))
        setattr(x, _ATTRIBUTE, asked)
    return asked[2]


def sum_partial(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum of a partial `x`, replicated."""
    result: torch.Tensor = _sum(x, group)
    return result


def gather_last(x: torch.Tensor, size: int, group: Group) -> torch.Tensor:
    """All ranks' slices of the last dimension joined, cut to `size`; slices equally wide."""
    result: torch.Tensor = _gather(x, size, group)
    return result


def split_last(x: torch.Tensor, span: tuple[int, int], group: Group) -> torch.Tensor:
    """``x[..., span[0]:span[1]]`` of a replicated `x`, whose gradient becomes whole again."""
    result: torch.Tensor = _split(x, span, group)
    return result


def exchange_rows(
    x: torch.Tensor, sent: list[int], received: list[int], exchange: RowExchange
) -> torch.Tensor:
    """`RowExchange.rows`, through which gradients go back to the ranks that rows came from."""
    result: torch.Tensor = _exchange_rows(x, sent, received, exchange)
    return result
