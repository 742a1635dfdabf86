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
    order: the largest that have several linear layers of an MLP, or stacked experts, and no
    attention and no router. `model` may be on the meta device; without adapters, not sharded."""
    products = set(layers_of(model, "mlp"))
    stacks = set(stacked_weights(model))
    roles = list(parameter_roles(model).values())

    def is_product(entry: ParameterRole) -> bool:
        return entry.name in stacks or (entry.role is Role.MATRIX and entry.module in products)

    def mlps_in(name: str, module: nn.Module) -> Iterator[str]:
        entries = [entry for entry in roles if entry.name.startswith(f"{name}.")]
        weights = [entry for entry in entries if is_product(entry)]
        further_entries = [entry for entry in entries if not is_product(entry)]
        is_mlp = len(weights) > 1 or any(entry.name in stacks for entry in weights)
        is_called = not isinstance(module, nn.ModuleList | nn.ModuleDict)
        if is_mlp and is_called and all(entry.role in _FURTHER_ROLES for entry in further_entries):
            yield name
        elif weights:
            for leaf, child in module.named_children():
                yield from mlps_in(f"{name}.{leaf}", child)

    mlps: list[str] = []
    for name, layer in decoder_layers(model):
        for leaf, child in layer.named_children():
            mlps += mlps_in(f"{name}.{leaf}", child)
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
    """Return the parameters of submodules of `module`, which `module` uses directly if tiled."""
    direct_ids = {id(parameter) for parameter in module.parameters(recurse=False)}
    return [parameter for parameter in module.parameters() if id(parameter) not in direct_ids]


class Tiles:
    """Makes `module` compute `tile_tokens` tokens at a time, and again in the backward pass.

    Tensors among its arguments, and its output, have the tokens in all dimensions but the last. A
    call with fewer tokens computes one tile. Raises ModelError for other calls.
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
        count, weights = len(tensors), self._trained()
        output: torch.Tensor = _Tiled.apply(self, call, count, *tensors, *weights)  # type: ignore[no-untyped-call]
        return output

    def compute(self, call: _Call, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the output for `tensors` [..., H], without a graph."""
        rows = [tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors]
        output: torch.Tensor | None = None
        for part in self._parts(len(rows[0])):
            tile = call.run([tensor[part] for tensor in rows])
            if output is None:
                output = tile.new_empty(*tensors[0].shape[:-1], tile.shape[-1])
            output.view(-1, tile.shape[-1])[part] = tile
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
        weights = self._trained()
        leaves = [weight.detach().requires_grad_() for weight in weights]
        sums = [GradientSum(weight) for weight in weights]
        with torch.enable_grad(), substituted(self._module, weights, leaves):
            for part in self._parts(len(upstream)):
                tile = [
                    tensor[part].detach().requires_grad_(needs_gradient)
                    for tensor, needs_gradient in zip(rows, call.needs_gradient, strict=True)
                ]
                output = call.run(tile)
                differentiated = [tensor for tensor in tile if tensor.requires_grad] + leaves
                gradients = torch.autograd.grad(
                    output, differentiated, upstream[part], allow_unused=True
                )
                del output
                # Store the gradients of the tile's tokens, and add up the parameters'.
                targets = [target for target in grad_rows if target is not None]
                for target, gradient in zip(targets, gradients, strict=False):
                    if gradient is not None:
                        target[part] = gradient
                for total, gradient in zip(sums, gradients[len(targets) :], strict=True):
                    if gradient is not None:
                        total.add(gradient)
        grad_tensors = [
            None if gradient is None else gradient.view(tensor.shape)
            for gradient, tensor in zip(grad_rows, tensors, strict=True)
        ]
        return [*grad_tensors, *(None if total.is_empty else total.value() for total in sums)]

    def _trained(self) -> list[nn.Parameter]:
        return [p for p in self._module.parameters() if p.requires_grad]

    def _parts(self, num_rows: int) -> Iterator[slice]:
        """Yield the tiles of `num_rows` tokens; an empty tile if there are none."""
        for start in range(0, max(1, num_rows), self._tile_tokens):
            yield slice(start, start + self._tile_tokens)


@dataclass(frozen=True)
class _Call:
    """One call of a module. keys, dims, needs_gradient: positions or names of the arguments that
    are tensors, their numbers of dimensions, and whether they need a gradient. args, kwargs: all
    arguments, with None for tensors, which only autograd keeps."""

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
        """Return the call and its tensors. Raises ModelError for tensors with
        different numbers of tokens."""
        values: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        tensors = {key: value for key, value in values if isinstance(value, torch.Tensor)}
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
        """Return the output [n, H] for a tile's tensors, [n, H] each."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for key, dim, rows in zip(self.keys, self.dims, tile, strict=True):
            value = rows.view(*(1,) * (dim - 2), *rows.shape)
            if isinstance(key, int):
                args[key] = value
            else:
                kwargs[key] = value
        output = self.forward(*args, **kwargs)
        is_fit = isinstance(output, torch.Tensor) and output.dim() == self.dims[0]
        if not is_fit or output.shape[:-1].numel() != len(tile[0]):
            raise ModelError("an MLP does not return one tensor with a row for each token")
        result: torch.Tensor = output.reshape(-1, output.shape[-1])
        return result


class _Tiled(torch.autograd.Function):
    """Computes without a graph, and again with one in the backward pass."""

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
        """Draw from this state inside, and continue after as if nothing had been drawn."""
        device_options = {} if self._device_type == "cpu" else {"device_type": self._device_type}
        with torch.random.fork_rng(devices=self._devices, **device_options):
            torch.set_rng_state(self._cpu_state)
            if self._devices:
                set_device_states(self._devices, self._states, device_type=self._device_type)
            yield
