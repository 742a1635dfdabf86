"""Forward passes of recurrent layers whose heads tensor-parallel ranks divide
(`bigtrain.models.parallel.recurrent_divisions`): local sizes, states of groups of heads that ranks
share, and norms over the channels of several ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from bigtrain.models.layers.recurrence.functions import divide_functions
from bigtrain.models.parallel.collectives import Group, gather_last, sum_gradient, sum_partial
from bigtrain.models.parallel.recurrent_divisions import Division, ranges_of
from bigtrain.models.torch_patches import shadow, unshadow

_SET_ATTRIBUTES = "bigtrain_set_attributes"


def divide_layer(layer: nn.Module, division: Division, group: Group) -> None:
    """Make `layer` compute the heads of this rank of `group`; not its linear layers, which are
    wrapped as all linear layers are. Its attributes change in its first forward pass or by
    `set_local_attributes`, since initial weights are drawn for the unsharded layer. Collective
    forward passes."""
    rank, size, groups = dist.get_rank(group), dist.get_world_size(group), division.groups

    def set_attributes() -> None:
        hook.remove()
        unshadow(layer, _SET_ATTRIBUTES)
        for name, value in division.local(size).items():
            path, _, attribute = name.rpartition(".")
            owner = layer.get_submodule(path)
            if hasattr(owner, attribute):
                setattr(owner, attribute, value)
        for name, parts in division.buffers.items():
            if isinstance(getattr(layer, name, None), torch.Tensor):
                full = getattr(layer, name)
                local = [full[..., start:stop] for start, stop in ranges_of(parts, rank, size)]
                setattr(layer, name, torch.cat(local, -1))

    hook = layer.register_forward_pre_hook(lambda _module, _args: set_attributes())
    shadow(layer, _SET_ATTRIBUTES, set_attributes)
    prepare = partial(_gather_states, groups, group) if 0 < groups < size else dict
    divide_functions(layer, prepare)
    norm = getattr(layer, division.norm, None) if division.norm else None
    if norm is not None and 0 < groups < size:
        shadow(norm, "forward", _over_ranks(norm.forward, groups, group))


def set_local_attributes(model: nn.Module) -> None:
    """Let the divided layers of `model`, whose weights are drawn or loaded, have the attributes of
    their first forward pass: compiled layers whose attributes change are compiled again."""
    for module in list(model.modules()):
        if set_attributes := vars(module).get(_SET_ATTRIBUTES):
            set_attributes()


def _gather_states(groups: int, group: Group, arguments: dict[str, Any]) -> dict[str, Any]:
    """Give ``B`` and ``C`` [B, T, 1, N / holders] of a scan all states of this rank's group, from
    the ranks that hold parts of the states: [B, T, 1, N]."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    gathered = {}
    for name in ("B", "C"):
        part = arguments[name]
        width = part.shape[-1] * size
        every_group = sum_gradient(gather_last(part, width, group), group)
        gathered[name] = every_group.unflatten(-1, (groups, -1))[..., rank * groups // size, :]
    return arguments | gathered


def _over_ranks(forward: Any, groups: int, group: Group) -> Any:
    """Return the forward pass of a norm whose means are over the channels of every rank that shares
    one of `groups`."""

    def normalize(*args: Any, **kwargs: Any) -> torch.Tensor:
        with _MeanOverRanks(groups, group):  # a mode is not traced
            output: torch.Tensor = forward(*args, **kwargs)
        return output

    reason = "the means of a norm are over the channels of several ranks"
    return torch.compiler.disable(normalize, reason=reason)


class _MeanOverRanks(TorchFunctionMode):
    """Makes means over a rank's channels the means over the channels of the group of heads, of
    which every rank has equally many."""

    def __init__(self, groups: int, group: Group) -> None:
        super().__init__()
        self._groups, self._group = groups, group

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.Tensor.mean, torch.mean):
            return result
        rank, size = dist.get_rank(self._group), dist.get_world_size(self._group)
        number = rank * self._groups // size
        # One place for each group of heads: [..., groups, 1].
        places = F.pad(result, (0, 0, number, self._groups - 1 - number))
        total = sum_gradient(sum_partial(places, self._group), self._group)
        return total[..., number : number + 1, :] * self._groups / size
