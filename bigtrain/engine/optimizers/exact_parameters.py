"""Exact values of parameters, in another dtype than DeepSpeed's 16-bit copies.

Some architectures compute in 16 bits but keep some parameters in float32
(`ParameterPlan.float32_names`: routers, recurrent states, selection biases). Modules read these
parameters from float32 tensors, assembled from the fp32 masters after each update; the gradient
goes to the 16-bit copy. Frozen parameters are kept in the dtype of the base's file
(`bigtrain.engine.checkpoint.fragments`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bigtrain.engine.optimizers.masters import MasterPart, master_parts
from bigtrain.engine.startup.mesh import Mesh
from bigtrain.models.layers.adapter_names import base_name
from bigtrain.models.layers.parameters import give_properties, local_shape
from bigtrain.models.torch_patches import own_parameter


class _Exact(torch.autograd.Function):
    """Value of a parameter in another dtype, whose gradient becomes the parameter's gradient."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.dtype = parameter.dtype
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.to(ctx.dtype), None


class ExactParameters:
    """Exact values of the parameters of an engine. values: parameters that modules read in float32,
    by name, this rank's complete shard. owned: names of parameters that are updated in `values`,
    not by the optimizer. frozen: this rank's range of frozen parameters as in the files; None if
    another rank with an equal range keeps it."""

    def __init__(
        self,
        model: nn.Module | None = None,
        names: Collection[str] = (),
        device: torch.device | None = None,
    ) -> None:
        """Let the modules of `model` read the parameters `names`, by their names in the model
        without adapters, from float32 tensors on `device`. Call this before DeepSpeed casts the
        model; values are zeros until `refresh`."""
        self.values: dict[str, torch.Tensor] = {}
        self.owned: set[str] = set()
        self.frozen: dict[str, torch.Tensor | None] = {}
        if model is None or not names:
            return
        for prefix, module in list(model.named_modules()):
            properties = {}
            for leaf, parameter in module.named_parameters(recurse=False):
                name = f"{prefix}.{leaf}" if prefix else leaf
                if base_name(name) in names:
                    self.values[name] = torch.zeros(local_shape(parameter), device=device)
                    properties[leaf] = self._property(name, leaf)
            if properties:
                give_properties(module, properties)

    def _property(self, name: str, leaf: str) -> property:
        """Return a property that hides the parameter `leaf` of a module, and is its float32 value:
        gradients reach the parameter."""

        def read(module: nn.Module) -> torch.Tensor:
            parameter = own_parameter(module, leaf)
            value: torch.Tensor = _Exact.apply(parameter, self.values[name])  # type: ignore[no-untyped-call]
            return value

        return property(read)

    @torch.no_grad()
    def refresh(
        self, engine: Any, model: nn.Module, mesh: Mesh, *, trained_only: bool = False
    ) -> None:
        """Assemble the values of `model`, which `engine` trains, from its masters. Collective over
        the ranks of a stage. `trained_only`: do not change frozen parameters."""
        if not self.values:
            return
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        names = [name for name in self.values if name in trained or not trained_only]
        parts: dict[str, MasterPart] = {}
        if names:
            parts = {part.name: part for part in master_parts(engine, model) if part.count}
        for name in names:
            part, flat = parts.get(name), self.values[name].view(-1)
            # Replicas have disjoint ranges of the shard: filled up with zeros, the ranges add up to
            # the shard. Replicated parts need no sum.
            is_divided = part is None or not part.is_replicated
            if is_divided:
                flat.zero_()
            if part is not None:
                frozen_value = self.frozen.get(name)
                master = part.of(part.master.data) if frozen_value is None else frozen_value
                flat.narrow(0, part.start, part.count).copy_(master)
            if is_divided:
                dist.all_reduce(flat, group=mesh.replicas)
