"""Files and keys that describe tensors which an export does not have: with them, readers such as
vLLM would misread the export's full-precision tensors."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from bigtrain.models.configuration import QUANTIZATION_KEYS

_QUANTIZED = "describes quantized tensors, and those of the export are not"
_OTHER_FORMAT = "describes weights in a format that is not exported"
LEFT_OVER_FILES = {
    **dict.fromkeys(
        (
            "hf_quant_config.json",  # ModelOpt
            "quantize_config.json",  # GPTQ
            "quant_config.json",  # AWQ
            "quantization_config.json",
            "quant_model_description.json",  # MindIE
            "quant_strategy.json",
            "smash_config.json",  # Pruna
        ),
        _QUANTIZED,
    ),
    **dict.fromkeys(
        (
            "params.json",  # consolidated weights of Mistral and Meta
            "openvino_config.json",
            "openvino_model.xml",
            "ort_config.json",
            "genai_config.json",  # ONNX
            "mlc-chat-config.json",
            "ndarray-cache.json",
            "tensor-cache.json",
        ),
        _OTHER_FORMAT,
    ),
    "adapter_config.json": "describes an adapter, which transformers would load onto the model",
}
"""Reasons not to export files of a base, by file name, in any folder."""


def left_over_reason(name: str) -> str | None:
    """Return why the file `name` of a base, a path with slashes, is not exported although it has no
    weights; None if it is exported. Empty for an index of weights: an export writes its index."""
    *folders, file = name.split("/")
    if file.endswith(".json") and ".index." in file:
        return ""
    if any(folder.endswith((".mlpackage", ".mlmodelc")) for folder in folders):
        return _OTHER_FORMAT
    return LEFT_OVER_FILES.get(file)


def drop_quantization(values: MutableMapping[str, Any], prefix: str = "") -> list[str]:
    """Remove `QUANTIZATION_KEYS` from the JSON `values` of a configuration and its nested
    configurations; return the names of the removed keys."""
    removed = [key for key in QUANTIZATION_KEYS if key in values]
    for key in removed:
        del values[key]
    names = [prefix + key for key in removed]
    for key, nested in values.items():
        if isinstance(nested, dict):
            names += drop_quantization(nested, f"{prefix}{key}.")
    return names
