"""Comparison of the parameters that a probe saw no gradient of with the gradients of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from bigtrain.errors import ModelError

_SHOWN = 5


class UnreachedParameters:
    """Parameters that are not trained since a probe gave them no gradient.

    names: equal on every rank; a pipeline stage contains some of the parameters.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], device: torch.device) -> None:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self._names, self._device = tuple(names), device
        self._parameters = {name: parameters[name] for name in names if name in parameters}

    @contextmanager
    def compared(self) -> Iterator[None]:
        """Inside, the first time, the parameters take part in autograd's graph. Raises ModelError
        on every rank if a parameter has a gradient on any rank. Collective over all ranks then."""
        if not self._names:
            yield
            return
        reached = torch.zeros(len(self._names), device=self._device, dtype=torch.int32)

        def mark(index: int, gradient: torch.Tensor) -> None:
            reached[index] = 1

        # DeepSpeed has registered hooks already, for parameters that required gradients at that
        # time.
        hooks = []
        for name, parameter in self._parameters.items():
            parameter.requires_grad_()
            hooks.append(parameter.register_hook(partial(mark, self._names.index(name))))
        yield
        for parameter, hook in zip(self._parameters.values(), hooks, strict=True):
            hook.remove()
            parameter.requires_grad_(False)
            parameter.grad = None
        dist.all_reduce(reached, dist.ReduceOp.MAX)
        names = [name for name, flag in zip(self._names, reached.tolist(), strict=True) if flag]
        self._names, self._parameters = (), {}
        if names:
            remainder = "" if len(names) <= _SHOWN else f" and {len(names) - _SHOWN} more"
            raise ModelError(
                f"{', '.join(names[:_SHOWN])}{remainder}: frozen, since no gradient reached them "
                "in a probe of the model, but the first step has a gradient for them; nothing was "
                f"saved -> model.frozen={names[:_SHOWN]} if they are not to be trained, or report "
                "the model's configuration"
            )
