"""Products of linear layers in float8, by torchao's casts (0.18): which layers, and their forwards.

A product casts its two operands from the dtype of the parameters, in the forward pass and twice in
the backward pass. Weights, activations, gradients and optimizer states are stored as without
float8, so checkpoints and exports do not change. On a CPU torchao emulates: it casts, and
multiplies in the parameters' dtype.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from bigtrain.errors import Problem
from bigtrain.models.layers.adapter_names import computing_modules
from bigtrain.models.layers.parameter_roles import Role, parameter_roles
from bigtrain.models.layers.parameters import decoder_layers
from bigtrain.models.layers.plans import NO_FLOAT8, Float8Plan
from bigtrain.models.torch_patches import shadow
from bigtrain.settings.sections.model import Float8
from bigtrain.system.extras import install_line

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Activations [..., in] and a weight [out, in] -> [..., out]."""

_CAPABILITY = {
    "tensorwise": (8, 9),
    "rowwise": (9, 0),
    "rowwise_with_gw_hp": (9, 0),
    "mxfp8": (10, 0),
}
"""Smallest CUDA compute capability: torch/_scaled_mm has tensor scales from Ada, row scales from
Hopper and blocks of 32 from Blackwell on."""


def unit_of(recipe: Float8) -> int:
    """Return the number that widths and tokens of a product are multiples of: 16 for
    torch._scaled_mm, 32 for the blocks of mxfp8."""
    return 32 if recipe == "mxfp8" else 16


def install_float8(model: PreTrainedModel, plan: Float8Plan) -> None:
    """Replace the forward methods of the plan's layers. Call it after adapters are added, and
    before layers are sharded or removed."""
    product = float8_product(plan.recipe, is_emulated=plan.is_emulated)
    modules = computing_modules(model)
    for name in plan.names:
        layer = getattr(modules[name], "base_layer", modules[name])
        shadow(layer, "product", product)
        # A bound method: torch compiles a function that holds a layer anew for every layer.
        shadow(layer, "forward", MethodType(_forward, layer))


def _forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = layer.product(x, layer.weight)
    return output if layer.bias is None else output + layer.bias.to(output.dtype)


def product_of(layer: Any) -> Product:
    """Return the product of a linear layer without its bias: float8's, or else torch's."""
    product: Product = vars(layer).get("product", F.linear)
    return product


def check_float8(recipe: Float8) -> list[Problem]:
    """Return problems of a `recipe` other than none with this installation and its GPU, if any."""
    if importlib.util.find_spec("torchao") is None:
        remedy = f"{install_line('float8')}, or precision.float8=none"
        return [Problem("precision.float8", recipe, "torchao is not installed", remedy)]
    if not torch.cuda.is_available():
        return []
    capability, needed = torch.cuda.get_device_capability(), _CAPABILITY[recipe]
    if capability >= needed:
        return []
    possible = [name for name, minimum in _CAPABILITY.items() if capability >= minimum]
    rule = (
        f"needs compute capability {needed[0]}.{needed[1]}, and {torch.cuda.get_device_name()} has "
        f"{capability[0]}.{capability[1]}"
    )
    remedy = f"precision.float8={possible[-1] if possible else 'none'}"
    return [Problem("precision.float8", recipe, rule, remedy)]


def plan_float8(
    model: PreTrainedModel, recipe: Float8, tensor_size: int, num_tokens: int
) -> tuple[Float8Plan, list[Problem]]:
    """Choose the layers of `model` (which may be on the meta device; not sharded, no adapters):
    linear layers inside decoder layers, without routers, whose widths the unit divides on each of
    `tensor_size` ranks. num_tokens: of a micro-batch on one rank."""
    unit = unit_of(recipe)
    if num_tokens % unit:
        rule = f"needs micro-batches of a multiple of {unit} tokens on a rank, not {num_tokens}"
        remedy = f"a batch.sequence_length that {unit} divides, or precision.float8=none"
        return NO_FLOAT8, [Problem("precision.float8", recipe, rule, remedy)]

    # Linear layers that multiply the hidden states of every token. (Layers that experts hold one by
    # one multiply a number of tokens that changes.)
    converted: list[str] = []
    unconverted: list[str] = []
    prefixes = tuple(f"{name}." for name, _ in decoder_layers(model))
    for name, entry in parameter_roles(model).items():
        if entry.role is not Role.MATRIX or entry.leaf != "weight" or entry.num_groups > 1:
            continue
        layer = model.get_submodule(entry.module)
        is_expert = "experts" in entry.module.split(".")
        if type(layer) is nn.Linear and name.startswith(prefixes) and not is_expert:
            widths = (layer.out_features, layer.in_features)
            fits = all(width % (unit * tensor_size) == 0 for width in widths)
            (converted if fits else unconverted).append(entry.module)
    if not converted:
        rule = (
            f"no linear layer inside the decoder layers of this {model.config.model_type} has "
            f"widths that are multiples of {unit * tensor_size}"
        )
        return NO_FLOAT8, [Problem("precision.float8", recipe, rule, "precision.float8=none")]

    # The log line about the plan.
    reason = f"float8: {recipe} products in {len(converted)} linear layers"
    if unconverted:
        leaf_names = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in unconverted))
        reason += (
            f"; {len(unconverted)} stay as they are, whose widths are no multiples of "
            f"{unit * tensor_size} ({leaf_names})"
        )
    is_emulated = not torch.cuda.is_available()
    if is_emulated:
        reason += "; emulated on a CPU, which is slow"
    return Float8Plan(recipe, tuple(converted), is_emulated, reason), []


def float8_product(recipe: Float8, *, is_emulated: bool) -> Product:
    """Return the differentiable product of a torchao recipe. Operands are in the parameters' dtype,
    as are results and gradients."""
    if recipe == "mxfp8":
        # Torchao's product in blocks of 32, whose function saves the parameter itself.
        from torchao.prototype.moe_training.mxfp8_linear import mx_mm
        from torchao.prototype.mx_formats.config import (
            MXFP8Dim0CastKernelChoice,
            MXFP8Dim1CastKernelChoice,
            ScaleCalculationMode,
        )
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

        torch_only = MXFP8Dim0CastKernelChoice.TORCH, MXFP8Dim1CastKernelChoice.TORCH
        fast = MXFP8Dim0CastKernelChoice.TRITON, MXFP8Dim1CastKernelChoice.CUDA
        preference = KernelPreference.EMULATED if is_emulated else KernelPreference.AUTO
        settings = (
            *(torch.float8_e4m3fn,) * 3,  # input, weight, gradient
            unit_of("mxfp8"),
            preference,
            *(torch_only if is_emulated else fast),
            ScaleCalculationMode.RCEIL,
            False,
        )
        return lambda x, weight: mx_mm.apply(x, weight, *settings)
    from torchao.float8 import (
        Float8LinearConfig,
        LinearMMConfig,
        ScaledMMConfig,
        convert_to_float8_training,
    )

    convert_to_float8_training(nn.Module())  # corrects inductor's float8 code, and converts nothing
    config = Float8LinearConfig.from_recipe_name(recipe)
    gemms = (
        config.gemm_config_output,
        config.gemm_config_grad_input,
        config.gemm_config_grad_weight,
    )
    products = LinearMMConfig(
        *(ScaledMMConfig(is_emulated, gemm.use_fast_accum, False, False) for gemm in gemms)
    )
    function = torch.compiler.allow_in_graph(_Float8Product)
    return lambda x, weight: function.apply(x, weight, config, products)


class _Float8Product(torch.autograd.Function):
    """`torchao.float8.float8_linear.matmul_with_hp_or_float8_args` that saves the parameter itself:
    ZeRO 3 frees gathered parameters, and a saved view, as torchao's, would keep them alive.
    Computes requested gradients only."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, config: Any, products: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.config, ctx.products = config, products
        cast = partial(_cast, config, products)
        rows = cast(x.reshape(-1, x.shape[-1]), "input", -1)
        product = torch.mm(rows, cast(weight.t(), "weight", 0))
        return product.reshape(*x.shape[:-1], product.shape[-1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        cast = partial(_cast, ctx.config, ctx.products)
        rows = gradient.reshape(-1, gradient.shape[-1])
        grad_input = grad_weight = None
        # The last argument is the dimension that a product sums over, along which scales are taken.
        if ctx.needs_input_grad[0]:
            weight_cast = cast(weight.t(), "weight_for_grad_input", -1)
            grad_input = torch.mm(cast(rows, "grad_output", -1), weight_cast.t()).reshape(x.shape)
        if ctx.needs_input_grad[1]:
            gradient_cast = cast(rows, "grad_output_for_grad_weight", 0)
            inputs = cast(x.reshape(-1, x.shape[-1]), "input_for_grad_weight", 0)
            grad_weight = torch.mm(gradient_cast.t(), inputs)
        return grad_input, grad_weight, None, None


def _cast(
    config: Any, products: Any, tensor: torch.Tensor, operand: str, dim: Literal[0, -1]
) -> torch.Tensor:
    """Return `tensor` in float8 (a tensor subclass of torchao's); unchanged where the recipe keeps
    this `operand` of `Float8LinearConfig`. dim: along which a row-wise recipe has one scale."""
    from torchao.float8 import GemmInputRole, ScalingGranularity, ScalingType
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic

    settings = getattr(config, f"cast_config_{operand}")
    if settings.scaling_type is ScalingType.DISABLED:
        return tensor
    is_rowwise = settings.scaling_granularity is ScalingGranularity.AXISWISE
    cast: torch.Tensor = hp_tensor_to_float8_dynamic(
        tensor,
        settings.target_dtype,
        products,
        gemm_input_role=GemmInputRole(operand.partition("_for_")[0]),
        scaling_granularity=settings.scaling_granularity,
        axiswise_dim=dim if is_rowwise else None,
        round_scales_to_power_of_2=config.round_scales_to_power_of_2,
    )
    return cast
