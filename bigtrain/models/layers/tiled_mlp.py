"""MLPs computed in tiles of tokens, and again in the backward pass, so that the activations inside
an MLP exist for the tokens of a single tile only (Arctic Long Sequence Training, arXiv 2506.13996).

The tiles' gradients of a parameter are added up in float32 and returned as one, so that the
parameter's hooks (reduction by ZeRO, sums over tensor-parallel ranks) run once, with the complete
gradient. DeepSpeed 0.19.8's `TiledMLP` (runtime/sequence_parallel/ulysses_sp.py) is not used: it
adds up in the parameters' dtype, runs hooks for each tile, loses the gradients if there are fewer
tiles than requested, draws other dropout masks in the backward pass, supports one tensor as the
only input (experts have three), and ZeRO 3 would gather an MLP's parameters for each tile.

Shapes: N = tokens of a call, n = tokens of a tile, H = a tensor's last dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import get_device_states, set_device_states
from transformers import PreTrainedModel

from bigtrain.errors import ModelError
from bigtrain.models.experts import exchange_of
from bigtrain.models.layers.adapter_targets import layers_of, stacked_weights
from bigtrain.models.layers.gradient_parts import GradientSum, substituted
from bigtrain.models.layers.parameter_roles import ParameterRole, Role, parameter_roles
from bigtrain.models.layers.parameters import decoder_layers
from bigtrain.models.torch_patches import shadow, unshadow

_TILES = "bigtrain_tiles"
_FURTHER_ROLES = {Role.BIAS, Role.NORM, Role.OTHER}
"""Roles of parameters that an MLP may have in addition to the weights of its products."""


def find_mlps(model: PreTrainedModel) -> list[str]:
    """Return names of the modules of decoder layers that can be computed in tiles, in the model's
    order: the largest modules that have several linear layers of an MLP, or stacked experts, and no
    attention and no router. `model`: without adapters, not sharded, possibly on the meta device."""
    linear_layers = set(layers_of(model, "mlp"))
    expert_stacks = set(stacked_weights(model))
    parameters = list(parameter_roles(model).values())

    def is_mlp_weight(parameter: ParameterRole) -> bool:
        is_linear = parameter.role is Role.MATRIX and parameter.module in linear_layers
        return is_linear or parameter.name in expert_stacks

    def mlps_in(name: str, module: nn.Module) -> Iterator[str]:
        """Yield `name` if the module is an MLP, otherwise the MLPs in the module."""
        module_parameters = [p for p in parameters if p.name.startswith(f"{name}.")]
        weights = [p for p in module_parameters if is_mlp_weight(p)]
        further_roles = {p.role for p in module_parameters if not is_mlp_weight(p)}
        is_mlp = len(weights) > 1 or any(weight.name in expert_stacks for weight in weights)
        is_called = not isinstance(module, nn.ModuleList | nn.ModuleDict)
        if is_mlp and is_called and further_roles <= _FURTHER_ROLES:
            yield name
        elif weights:
            for child_name, child in module.named_children():
                yield from mlps_in(f"{name}.{child_name}", child)

    mlps: list[str] = []
    for layer_name, layer in decoder_layers(model):
        for child_name, child in layer.named_children():
            mlps += mlps_in(f"{layer_name}.{child_name}", child)
    return mlps


def tiled_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of `model` that are computed in tiles."""
    return [module for module in model.modules() if _TILES in vars(module)]


def compile_tiles(model: nn.Module) -> None:
    """Make the tiles of `model` compile at their first call."""
    for module in tiled_modules(model):
        tiles: Tiles = vars(module)[_TILES]
        tiles.compile()


def parameters_inside(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of the submodules of `module`, but not those of `module` itself."""
    direct_ids = {id(parameter) for parameter in module.parameters(recurse=False)}
    return [parameter for parameter in module.parameters() if id(parameter) not in direct_ids]


class Tiles:
    """Makes `module` compute `tile_tokens` tokens at a time, and again in the backward pass.

    Tensors among the arguments, and the output, have the tokens in all dimensions but the last. A
    call with fewer tokens computes one tile. Raises ModelError for a call with other tensors.
    """

    def __init__(self, module: nn.Module, tile_tokens: int) -> None:
        assert tile_tokens >= 1
        self._module = module
        self._tile_tokens = tile_tokens
        self._plain_forward: Callable[..., Any] = module.forward
        self._tile_forward = self._plain_forward
        shadow(module, _TILES, self)
        shadow(module, "forward", self.forward)

    def compile(self) -> None:
        """Compile the computation of a tile; the division into tiles stays outside of graphs."""
        forward = torch.compiler.disable(self.forward, reason="an MLP is computed in tiles")
        shadow(self._module, "forward", forward)
        # Experts that ranks divide exchange tokens, which no graph can contain.
        if exchange_of(self._module) is None:
            self._tile_forward = torch.compile(self._plain_forward, dynamic=False)

    def remove(self) -> None:
        """Restore the module's forward method."""
        unshadow(self._module, _TILES)
        shadow(self._module, "forward", self._plain_forward)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Call the module's forward method for each tile."""
        call, tensors = _Call.from_arguments(self._tile_forward, args, kwargs)
        if not torch.is_grad_enabled():
            return self.compute(call, tensors)
        # The parameters are arguments so that autograd adds their gradients, once per call.
        inputs = (*tensors, *self._trained_parameters())
        output: torch.Tensor = _TiledFunction.apply(self, call, len(tensors), *inputs)  # type: ignore[no-untyped-call]
        return output

    def compute(self, call: _Call, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the output for `tensors` [..., H], without a graph."""
        rows = [tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors]
        output: torch.Tensor | None = None
        for tile_slice in self._tile_slices(len(rows[0])):
            tile_output = call.run([tensor[tile_slice] for tensor in rows])
            width = tile_output.shape[-1]
            if output is None:
                output = tile_output.new_empty(*tensors[0].shape[:-1], width)
            output.view(-1, width)[tile_slice] = tile_output
        assert output is not None
        return output

    def differentiate(
        self, call: _Call, tensors: Sequence[torch.Tensor], upstream: torch.Tensor
    ) -> list[torch.Tensor | None]:
        """Return the gradients of `tensors` and of the module's trained parameters; `upstream`: the
        gradient of the output."""
        rows = [tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors]
        upstream = upstream.reshape(-1, upstream.shape[-1])
        grad_rows = [
            torch.zeros_like(tensor) if needs_gradient else None
            for tensor, needs_gradient in zip(rows, call.needs_gradient, strict=True)
        ]

        # Compute each tile again. Weights are leaves without hooks, which run for the sums only.
        weights = self._trained_parameters()
        leaves = [weight.detach().requires_grad_() for weight in weights]
        sums = [GradientSum(weight) for weight in weights]
        with torch.enable_grad(), substituted(self._module, weights, leaves):
            for tile_slice in self._tile_slices(len(upstream)):
                tile = [
                    tensor[tile_slice].detach().requires_grad_(needs_gradient)
                    for tensor, needs_gradient in zip(rows, call.needs_gradient, strict=True)
                ]
                output = call.run(tile)
                inputs = [tensor for tensor in tile if tensor.requires_grad]
                gradients = torch.autograd.grad(
                    output, inputs + leaves, upstream[tile_slice], allow_unused=True
                )
                del output  # frees the graph
                # Store the gradients of the tile's tokens, and add up the parameters' gradients.
                targets = [target for target in grad_rows if target is not None]
                for target, gradient in zip(targets, gradients[: len(inputs)], strict=True):
                    if gradient is not None:
                        target[tile_slice] = gradient
                for total, gradient in zip(sums, gradients[len(inputs) :], strict=True):
                    if gradient is not None:
                        total.add(gradient)
        grad_tensors = [
            None if gradient is None else gradient.view(tensor.shape)
            for gradient, tensor in zip(grad_rows, tensors, strict=True)
        ]
        return [*grad_tensors, *(None if total.is_empty else total.value() for total in sums)]

    def _trained_parameters(self) -> list[nn.Parameter]:
        return [p for p in self._module.parameters() if p.requires_grad]

    def _tile_slices(self, num_rows: int) -> Iterator[slice]:
        """Yield the tiles of `num_rows` tokens; an empty tile if there are none."""
        for start in range(0, max(1, num_rows), self._tile_tokens):
            yield slice(start, start + self._tile_tokens)


@dataclass(frozen=True)
class _Call:
    """A call of a module's method `forward`. args, kwargs: the arguments, with None for tensors,
    which only autograd keeps. For each argument that is a tensor: keys: position or name. dims:
    number of dimensions. needs_gradient: whether autograd needs its gradient."""

    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    keys: tuple[int | str, ...]
    dims: tuple[int, ...]
    needs_gradient: tuple[bool, ...]

    @classmethod
    def from_arguments(
        cls, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[_Call, list[torch.Tensor]]:
        """Return the call and its tensors. Raises ModelError for tensors with different numbers of
        tokens, or with fewer than two dimensions."""
        arguments: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        tensors = {key: value for key, value in arguments if isinstance(value, torch.Tensor)}
        row_counts = {math.prod(tensor.shape[:-1]) for tensor in tensors.values()}
        if len(row_counts) != 1 or min(tensor.dim() for tensor in tensors.values()) < 2:
            shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors.values())
            raise ModelError(f"an MLP is called with tensors of shapes {shapes or None}")
        call = cls(
            forward,
            tuple(None if key in tensors else value for key, value in enumerate(args)),
            {key: None if key in tensors else value for key, value in kwargs.items()},
            tuple(tensors),
            tuple(tensor.dim() for tensor in tensors.values()),
            tuple(tensor.requires_grad for tensor in tensors.values()),
        )
        return call, list(tensors.values())

    def run(self, tile: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the output [n, H] for a tile's tensors, [n, H] each. Raises ModelError if the
        module returns anything else than a row for each token."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for key, num_dims, rows in zip(self.keys, self.dims, tile, strict=True):
            # The module gets the number of dimensions of the call, with leading dimensions of 1.
            value = rows.view(*(1,) * (num_dims - 2), *rows.shape)
            if isinstance(key, int):
                args[key] = value
            else:
                kwargs[key] = value
        output = self.forward(*args, **kwargs)
        has_call_dims = isinstance(output, torch.Tensor) and output.dim() == self.dims[0]
        if not has_call_dims or output.shape[:-1].numel() != len(tile[0]):
            raise ModelError("an MLP does not return one tensor with a row for each token")
        result: torch.Tensor = output.reshape(-1, output.shape[-1])
        return result


class _TiledFunction(torch.autograd.Function):
    """Computes a call without a graph, and again with a graph in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, tiles: Tiles, call: _Call, num_tensors: int, *tensors: torch.Tensor
    ) -> torch.Tensor:
        inputs = tensors[:num_tensors]
        ctx.tiles, ctx.call = tiles, call
        ctx.random = _RandomState(inputs[0])
        ctx.save_for_backward(*inputs)
        return tiles.compute(call, inputs)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with ctx.random.restored():
            gradients = ctx.tiles.differentiate(ctx.call, ctx.saved_tensors, upstream[0])
        return None, None, None, *gradients


class _RandomState:
    """State of the random streams at a call, from which dropout draws identical masks again."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._device_type = tensor.device.type
        self._cpu_state = torch.get_rng_state()
        self._devices, self._states = get_device_states(tensor)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, random streams start from this state; on exit, their states are restored."""
        device_options = {} if self._device_type == "cpu" else {"device_type": self._device_type}
        with torch.random.fork_rng(devices=self._devices, **device_options):
            torch.set_rng_state(self._cpu_state)
            if self._devices:
                set_device_states(self._devices, self._states, device_type=self._device_type)
            yield
