"""Parameters in the dtype that is theirs, beside the 16-bit copies that DeepSpeed holds.

Some architectures keep parameters in float32 where the model computes in 16 bit (`ParameterPlan.
kept`: routers, recurrent states, selection biases). DeepSpeed casts every parameter to the run's
dtype. So modules read such a parameter from a float32 tensor on this rank, which is assembled from
the fp32 masters after each update; its gradient goes to the 16-bit copy, as all others do.

Frozen parameters have no masters. What a base's file holds of them is kept in the file's dtype
where that is not the dtype of the copy, so that checkpoints and exports hold the same bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn

from bigtrain.engine.checkpoint.fragments import MASTER, Fragment, owned_fragments
from bigtrain.engine.startup.mesh import Mesh
from bigtrain.models.layers.adapters import base_name
from bigtrain.models.layers.parameters import give_properties, local_shape
from bigtrain.models.torch_patches import own_parameter


class _Exact(torch.autograd.Function):
    """The value of a parameter in another dtype, whose gradient is that of the parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.dtype = parameter.dtype
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.to(ctx.dtype), None


class ExactParameters:
    """The exact values of one engine's parameters.

    values: of those that modules read in float32, by name, this rank's shard in full.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        kept: Collection[str] = (),
        device: torch.device | None = None,
    ) -> None:
        """Let the modules of `model` read the parameters `kept`, by their names in the model
        without adapters, from float32 tensors on `device`. Call this before DeepSpeed casts the
        model; values are zeros until `refresh`."""
        self.values: dict[str, torch.Tensor] = {}
        # Of frozen parameters, this rank's range in the dtype of the file that it is from; None
        # where another rank that has the same range holds it.
        self._frozen: dict[str, torch.Tensor | None] = {}
        if model is None or not kept:
            return
        for prefix, module in list(model.named_modules()):
            properties = {}
            for leaf, parameter in module.named_parameters(recurse=False):
                name = f"{prefix}.{leaf}" if prefix else leaf
                if base_name(name) in kept:
                    self.values[name] = torch.zeros(local_shape(parameter), device=device)
                    properties[leaf] = self._property(name, leaf)
            if properties:
                give_properties(module, properties)

    def _property(self, name: str, leaf: str) -> property:
        def read(module: nn.Module) -> torch.Tensor:
            parameter = own_parameter(module, leaf)
            value: torch.Tensor = _Exact.apply(parameter, self.values[name])  # type: ignore[no-untyped-call]
            return value

        return property(read)

    @torch.no_grad()
    def refresh(self, engine: Any, model: nn.Module, mesh: Mesh) -> None:
        """Assemble the values of `model`, which `engine` trains, from its masters. Collective over
        the ranks that hold the same stage."""
        if not self.values:
            return
        parts: dict[str, list[Fragment]] = {}
        for fragment in self.restored(owned_fragments(engine, model)):
            parts.setdefault(fragment.name, []).append(fragment)
        for name, value in self.values.items():
            flat = value.view(-1)
            own = parts.get(name, [])
            if not any(fragment.is_replicated for fragment in own):
                flat.zero_()
            for fragment in own:
                master = fragment.tensors[MASTER]
                flat.narrow(0, fragment.start, master.numel()).copy_(master)
            if not own or not own[0].is_replicated:
                dist.all_reduce(value, group=mesh.replicas)

    # --- frozen parameters ---

    def hold(
        self, fragment: Fragment, dtype: torch.dtype, mesh: Mesh, *, is_saved: bool = True
    ) -> Fragment:
        """`fragment`, of a frozen parameter, to be filled with what a file holds in `dtype`: its
        own tensor where that has the dtype, or else one that is kept here if modules read it or
        checkpoints hold it (`is_saved`)."""
        master = fragment.tensors[MASTER]
        self._frozen.pop(fragment.name, None)
        if dtype == master.dtype or not dtype.is_floating_point:
            return fragment
        is_read = fragment.name in self.values
        if not is_saved and not is_read:
            return fragment
        exact = torch.empty(master.numel(), dtype=dtype)
        keeps = is_read or not fragment.is_replicated or _holder(fragment, mesh)
        self._frozen[fragment.name] = exact if keeps else None
        return replace(fragment, tensors={MASTER: exact})

    def restored(self, fragments: Iterable[Fragment]) -> list[Fragment]:
        """`fragments` with the exact values of frozen parameters where this rank has them."""
        found = []
        for fragment in fragments:
            exact = self._frozen.get(fragment.name)
            found.append(fragment if exact is None else replace(fragment, tensors={MASTER: exact}))
        return found

    def saved(self, fragments: Iterable[Fragment], mesh: Mesh) -> list[Fragment]:
        """`fragments` as a checkpoint holds them: of frozen parameters exact values, from the one
        rank that has them where several have the same range."""
        found = []
        for fragment in self.restored(fragments):
            if fragment.name in self._frozen and fragment.is_replicated:
                if _holder(fragment, mesh):
                    found.append(replace(fragment, is_replicated=False))
                continue
            found.append(fragment)
        return found

    def itemsizes(self) -> Mapping[str, int]:
        """Bytes per element of frozen parameters that are kept here in another dtype, by name."""
        return {name: t.element_size() for name, t in self._frozen.items() if t is not None}


def _holder(fragment: Fragment, mesh: Mesh) -> bool:
    """Whether this rank, of those that have the same range, is the one that keeps it."""
    group = mesh.expert_replicas if fragment.shard.over == "expert" else mesh.replicas
    return crc32(fragment.name.encode()) % dist.get_world_size(group) == dist.get_rank(group)
