"""A frozen base whose linear layers have weights in 4 bits (QLoRA) or 8 bits (LLM.int8), by
bitsandbytes (0.50). Layers are replaced before the engine exists, and are empty until their weights
are read. So nothing casts, moves or sends packed weights, and no rank ever holds more than one full
weight."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from bigtrain.errors import Problem
from bigtrain.models.layers.adapter_checks import QUANTIZED_KEY
from bigtrain.models.layers.adapter_names import MAGNITUDE, base_name
from bigtrain.models.layers.adapter_targets import quantized_layers
from bigtrain.models.layers.adapters import quiet_bitsandbytes
from bigtrain.models.weights.import_hf import Weights
from bigtrain.models.weights.lazy_tensors import LazyTensor, Offsets, allocate, forget_computed
from bigtrain.models.weights.packed import is_quantized
from bigtrain.planner.model_costs import BLOCK_SIZE
from bigtrain.settings.sections.adapters import AdaptersSection
from bigtrain.system.extras import install_line


def check_quantization(section: AdaptersSection | None) -> list[Problem]:
    """Return a problem if the run needs bitsandbytes, which is not installed. Imports nothing."""
    if section is None or not section.is_quantized or importlib.util.find_spec("bitsandbytes"):
        return []
    rule = "bitsandbytes is not installed"
    remedy = f"{install_line('qlora')}, or {QUANTIZED_KEY}=none"
    return [Problem(QUANTIZED_KEY, section.quantization, rule, remedy)]


def quantize_layers(model: PreTrainedModel, section: AdaptersSection, dtype: torch.dtype) -> None:
    """Replace linear layers of `model` by bitsandbytes' layers, in place, with empty weights.
    `dtype`: the run's dtype, to which weights are rounded before they are quantized. Biases stay.
    Call `check_quantization` before, and `finish_layers` after adapters are added."""
    library = import_bitsandbytes()
    for name in quantized_layers(model):
        layer: Any = model.get_submodule(name)
        is_transposed = isinstance(layer, Conv1D)
        shape = layer.weight.shape
        num_outputs, num_inputs = reversed(shape) if is_transposed else shape
        quantized: Any
        if section.quantization == "int8":
            with torch.device("meta"):
                quantized = library.nn.Linear8bitLt(
                    num_inputs,
                    num_outputs,
                    bias=False,
                    has_fp16_weights=False,
                    threshold=section.llm_int8_threshold,
                )
            quantized.compute_dtype = layer.weight.dtype  # peft makes adapters in this dtype
            quantized.weight = library.nn.Int8Params(
                torch.empty(0, dtype=torch.int8), requires_grad=False
            )
            quantized.weight.bnb_quantized = True
        else:
            with torch.device("meta"):
                quantized = library.nn.Linear4bit(
                    num_inputs,
                    num_outputs,
                    bias=False,
                    compute_dtype=layer.weight.dtype,  # peft makes adapters in this dtype
                    compress_statistics=section.double_quantization,
                    quant_type=section.quantization,
                )
            quantized.weight = library.nn.Params4bit(
                torch.empty(0, dtype=torch.uint8),
                requires_grad=False,
                blocksize=BLOCK_SIZE,
                compress_statistics=section.double_quantization,
                quant_type=section.quantization,
                module=quantized,
                bnb_quantized=True,  # otherwise `to` would quantize the empty weight
            )
        quantized.bias = layer.bias
        quantized.quantized_from, quantized.is_transposed = dtype, is_transposed
        model.set_submodule(name, quantized)
    compute_plainly(model)
    # transformers sets this attribute, by which peft chooses its classes of layers.
    bits = "8bit" if section.quantization == "int8" else "4bit"
    setattr(model, f"is_loaded_in_{bits}", True)


def compute_plainly(model: nn.Module) -> None:
    """Make quantized layers compute in the run's way on every CPU, and suppress the warning of each
    product that LLM.int8 casts inputs to float16.

    On a CPU with AVX-512 BF16, layers would otherwise pack their weights again in the first pass
    without gradients, and compute in bfloat16 and without gradients afterwards (bitsandbytes
    0.50.2, nn/modules.py, `Linear4bit.forward`; autograd/_functions.py, `matmul_4bit`).
    """
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    for module in model.modules():
        layer: Any = module
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False


def bits_and_bytes(section: AdaptersSection, dtype: torch.dtype) -> BitsAndBytesConfig:
    """Return the option with which `from_pretrained` quantizes like a run in `dtype`."""
    import_bitsandbytes()  # quietly, before transformers does
    if section.quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=section.llm_int8_threshold)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=section.quantization,
        bnb_4bit_use_double_quant=section.double_quantization,
        bnb_4bit_compute_dtype=section.compute_dtype or dtype,
    )


@torch.no_grad()
def fill_with_zeros(model: nn.Module, device: torch.device | str = "cpu") -> None:
    """Set the weights of quantized layers to zeros, so that they can compute before weights are
    read."""
    for module in filter(is_quantized, model.modules()):
        layer: Any = module
        if _is_int8(layer):
            shape = (layer.out_features, layer.in_features)
            zeros = torch.zeros(shape, dtype=torch.int8, device=device)
            _set_int8_weight(layer, zeros, torch.zeros(layer.out_features, device=device))
            continue
        num_elements = layer.out_features * layer.in_features
        num_blocks, num_bytes = -(-num_elements // BLOCK_SIZE), -(-num_elements // 2)
        with torch.device(device):
            state = import_bitsandbytes().functional.QuantState(
                absmax=torch.zeros(num_blocks),
                shape=torch.Size((layer.out_features, layer.in_features)),
                code=torch.zeros(16),  # values of the 4-bit codes
                blocksize=BLOCK_SIZE,
                quant_type=layer.weight.quant_type,
                dtype=torch.float32,
            )
            _set_4bit_weight(layer, torch.zeros(num_bytes, 1, dtype=torch.uint8), state)


@torch.no_grad()
def finish_layers(model: nn.Module, section: AdaptersSection) -> None:
    """Set the dtype in which quantized layers compute (default: the run's dtype), and empty their
    weights until `read_quantized` fills them."""
    for module in filter(is_quantized, model.modules()):
        layer: Any = module
        layer.compute_dtype = layer.quantized_from
        if _is_int8(layer):
            _set_int8_weight(layer, torch.empty(0, dtype=torch.int8), None)
            continue
        if section.compute_dtype is not None:
            layer.compute_dtype = getattr(torch, section.compute_dtype)
        _set_4bit_weight(layer, torch.empty(0, dtype=torch.uint8), None)


@torch.no_grad()
def read_quantized(model: nn.Module, weights: Weights, device: torch.device) -> None:
    """Read and pack the weights of all quantized layers on `device`, one at a time. Not collective:
    every rank reads every weight. Raises ModelError as `Weights.fill`."""
    for name, module in model.named_modules():
        if not is_quantized(module):
            continue
        layer: Any = module
        weight_name = base_name(f"{name}.weight")
        weight = allocate(tuple(weights.tensors[weight_name].shape), layer.quantized_from)
        weights.fill(weight_name, (0, 0), weight)
        weight = (weight.T if layer.is_transposed else weight).contiguous().to(device)
        if _is_int8(layer):
            # bitsandbytes' layer rounds weights to float16 before it quantizes them too.
            rounded = weight.to(torch.float16)
            codes, scales, _ = import_bitsandbytes().functional.int8_vectorwise_quant(rounded)
            _set_int8_weight(layer, codes, scales)
            continue
        packed, state = import_bitsandbytes().functional.quantize_4bit(
            weight,
            blocksize=BLOCK_SIZE,
            compress_statistics=layer.weight.compress_statistics,
            quant_type=layer.weight.quant_type,
        )
        _set_4bit_weight(layer, packed, state)
    forget_computed()


def _set_4bit_weight(layer: Any, packed: torch.Tensor, state: Any) -> None:
    """Set the `packed` weight of a layer in 4 bits, and bitsandbytes' `state` to unpack it."""
    layer.weight.data = packed
    layer.weight.quant_state = layer.quant_state = state


def _is_int8(layer: Any) -> bool:
    """Return whether a quantized layer is LLM.int8's."""
    return hasattr(layer, "state")


def _set_int8_weight(layer: Any, codes: torch.Tensor, scales: torch.Tensor | None) -> None:
    """Set the weight of an LLM.int8 layer: `codes` [out, in], and `scales` [out], the largest
    absolute values; None: an empty weight."""
    layer.weight.data = codes
    layer.state.CB = None if scales is None else codes
    layer.state.SCB = scales


@torch.no_grad()
def dequantized(layer: Any) -> torch.Tensor:
    """Return the dequantized weight [out, in] of a layer, with which the layer computes."""
    if _is_int8(layer):
        codes: torch.Tensor = layer.state.CB.to(torch.float32)
        return codes.mul_(layer.state.SCB.unsqueeze(1).mul(1.0 / 127.0))
    weight: torch.Tensor = import_bitsandbytes().functional.dequantize_4bit(
        layer.weight.data, layer.weight.quant_state
    )
    return weight


def weight_in_graph(module: Any) -> Any:
    """Return the weight [out, in] of a layer, dequantized if in 4 bits, by code that graphs may
    contain."""
    weight = module.weight
    if type(weight) is nn.Parameter:
        return weight
    import bitsandbytes

    return bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)


def import_bitsandbytes() -> Any:
    """Return bitsandbytes, an optional dependency that is imported on use only."""
    with quiet_bitsandbytes():
        import bitsandbytes
    return bitsandbytes


def with_magnitudes(weights: Weights, model: nn.Module) -> Weights:
    """Return `weights` with the initial values of DoRA's magnitudes in `model`: the 2-norm of every
    output's weights, float32 [outputs]. Reads no weights; the magnitudes of a 4-bit layer are
    computed from the quantized weight when they are read."""
    tensors: dict[str, LazyTensor] = dict(weights.tensors)
    for name, _ in model.named_parameters():
        if name.endswith(MAGNITUDE):
            layer_name = name.removesuffix(MAGNITUDE)
            layer: Any = model.get_submodule(layer_name)
            base_layer = layer.base_layer
            if is_quantized(base_layer):
                shape, magnitudes = (base_layer.out_features,), _QuantizedMagnitudes(base_layer)
                tensors[name] = LazyTensor(shape, torch.float32, magnitudes)
                continue
            weight = weights.tensors[f"{layer_name}.weight"]
            tensors[name] = magnitude(weight, transposed=bool(layer.fan_in_fan_out))
    return replace(weights, tensors=tensors)


@dataclass(frozen=True)
class _QuantizedMagnitudes:
    """Magnitudes of a quantized layer, which differ from the magnitudes of the file's weights."""

    layer: Any

    def fill(self, offsets: Offsets, out: torch.Tensor) -> None:
        magnitudes = magnitude(dequantized(self.layer), transposed=False)
        out.copy_(magnitudes[offsets[0] : offsets[0] + out.shape[0]])

    def sources(self) -> Iterator[object]:
        return iter(())


def magnitude(weight: Any, *, transposed: bool) -> Any:
    """Return the 2-norm of every output's weights, as peft computes it; lazy for a lazy `weight`.
    transposed: whether outputs are columns (Conv1D)."""
    dim = 0 if transposed else 1
    return torch.linalg.vector_norm(weight.to(torch.float32), dim=dim)
