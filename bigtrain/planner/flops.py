"""Model FLOPs per token, peak FLOPs of devices, and model FLOPs utilization (MFU).

Formula: Chowdhery et al. 2022, "PaLM: Scaling Language Modeling with Pathways" (arXiv 2204.02311),
appendix B. Forward and backward pass of a token cost ``6 N + 12 L H Q T`` FLOPs: ``N`` parameters
that are multiplied with (2 FLOPs forward, 4 backward), ``L`` layers, ``H`` heads of size ``Q``, and
sequences of ``T`` tokens. As in the paper, recomputed activations do not count (that would be
hardware utilization), and attention counts in full though a causal mask lets kernels skip half of
it, so that values are comparable with published ones. Layers with a recurrence have its FLOPs
instead of the second term (`bigtrain.planner.scans`), three times the forward pass; lightning
attention and RG-LRU, whose FLOPs are not known there, count as attention, an upper bound.

Pure: imports no torch.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bigtrain.planner.scans import has_attention, has_scan, scan_of
from bigtrain.settings.hf_config_keys import CHOSEN_EXPERTS, EXPERTS, number_of


@dataclass(frozen=True)
class ModelShape:
    """Model dimensions that determine the FLOPs of a token.

    `num_matmul_parameters`: parameters each token is multiplied with; `attention_width`: query
    heads times their size, summed over the layers; `scan_flops`: of the recurrences of every layer,
    in a token's forward pass.
    """

    num_matmul_parameters: int
    attention_width: int
    scan_flops: int = 0


def flops_per_token(shape: ModelShape, sequence_length: int, *, frozen: bool = False) -> int:
    """Return the FLOPs of a token's forward and backward pass, ``6 N + 12 L H Q T`` (see the
    module).

    `frozen`: if only adapters are trained, the weights have no gradients, so ``4 N`` remain; the
    adapters' own FLOPs are comparatively few and are ignored.
    """
    attention = shape.attention_width * sequence_length
    products = (4 if frozen else 6) * shape.num_matmul_parameters
    return products + 12 * attention + 3 * shape.scan_flops


def model_shape(
    config: object, parameters: Iterable[tuple[str, int]], input_embedding: str, *, tied: bool
) -> ModelShape | None:
    """Return the shape of a Hugging Face model, or None if its configuration lacks a dimension.

    Parameters
    ----------
    config: the text configuration of the model (``config.get_text_config()``).
    parameters: name and full number of elements of every parameter, a tied one once. Under ZeRO-3
        ``parameter.numel()`` is the size of this rank's shard: pass ``ds_numel``.
    input_embedding: name of the input embedding's weight. It is looked up, not multiplied with,
        and not counted, unless `tied`: then it is also the head's matrix, and is counted as such.
    tied: whether input embedding and head share their weight.

    Experts of a mixture (parameters below a module named ``experts``) count by the fraction that
    one token is routed to: ``num_experts_per_tok`` of ``num_local_experts``, or what the
    architecture calls them. Norms and biases stay in ``N``, as in the paper.
    """
    num_layers = number_of(config, ["num_hidden_layers"])
    if num_layers is None:
        return None
    # Some architectures have other heads in some layers (Gemma 4): a configuration for each layer.
    layer_configs = getattr(config, "per_layer_config", None)
    layers = (
        [layer_configs[n] for n in range(num_layers)] if layer_configs else [config] * num_layers
    )
    layer_types = getattr(config, "layer_types", None) or []
    if len(layer_types) != num_layers:
        layer_types = [None] * num_layers
    scan = scan_of(config)
    widths, scan_flops = [], 0
    for layer, layer_type in zip(layers, layer_types, strict=True):
        if scan is not None and has_scan(layer_type):
            scan_flops += scan.flops()
        if not has_attention(layer_type) and (scan is not None or not has_scan(layer_type)):
            continue
        num_heads = number_of(layer, ["num_attention_heads"])
        hidden_size = number_of(layer, ["hidden_size"])
        if num_heads is None or hidden_size is None:
            return None
        widths.append(num_heads * (number_of(layer, ["head_dim"]) or hidden_size // num_heads))
    num_dense = num_expert = 0
    for name, count in parameters:
        if name == input_embedding and not tied:
            continue
        if "experts" in name.split("."):
            num_expert += count
        else:
            num_dense += count
    if num_expert:
        num_used, num_all = number_of(config, CHOSEN_EXPERTS), number_of(config, EXPERTS)
        if num_used is None or num_all is None:
            return None
        num_expert = num_expert * num_used // num_all
    return ModelShape(num_dense + num_expert, sum(widths), scan_flops)


@functools.cache
def _peak_teraflops() -> list[tuple[str, float | None, float | None]]:
    """Return patterns of device names, each with the peaks of 16-bit floats and of float32."""
    text = (Path(__file__).parent / "tables/peak_flops.json").read_text(encoding="utf-8")
    return [tuple(row) for row in json.loads(text)["peaks"]]


_WITHOUT_BFLOAT16 = r"\b(V100|T4)\b"


def peak_flops_per_second(device_name: str, dtype: str) -> float | None:
    """Return the dense peak of a device, or None if it is unknown (e.g. a CPU).

    Parameters: `device_name` as ``torch.cuda.get_device_name()`` gives it; `dtype` as in
    ``precision.dtype``: bfloat16, float16 or float32 (without TF32, PyTorch's default).
    """
    for pattern, half, single in _peak_teraflops():
        if not re.search(pattern, device_name, re.IGNORECASE):
            continue
        if dtype == "bfloat16" and re.search(_WITHOUT_BFLOAT16, device_name):
            return None
        teraflops = {"bfloat16": half, "float16": half, "float32": single}.get(dtype)
        return None if teraflops is None else teraflops * 1e12
    return None


def model_flops_utilization(
    tokens_per_second: float,
    flops_per_token: int,
    peak_flops_per_second: float | None,
    *,
    num_devices: int,
) -> float | None:
    """Return achieved model FLOPs over the peak of the devices, between 0 and 1; None
    without a peak.

    `tokens_per_second` of the entire run, not per device.
    """
    if peak_flops_per_second is None:
        return None
    return tokens_per_second * flops_per_token / (peak_flops_per_second * num_devices)
