"""Names of layers for multi-token prediction in files of weights.

Two forms of names are published, both read by transformers' `MtpModel`: layers after the decoder
layers (DeepSeek-V3, GLM-4.5), and ``mtp.*`` (Mellum, a single layer). The form of an architecture
follows from the names in files that its class ignores.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from bigtrain.errors import ModelError
from bigtrain.models.layers.multi_token import NAME, MultiTokenLayers
from bigtrain.models.transformers_patches import (
    drop_expected_keys,
    ignored_keys,
    only_errors,
    without_progress,
)

_OWN = re.compile(rf"{NAME}\.layers\.(\d+)\.(mtp_block\.)?(.+)")
_NUMBERED = {"post_norm.": "shared_head.norm."}
_SINGLE = {
    "eh_proj.": "fc.",
    "enorm.": "pre_fc_norm_embedding.",
    "hnorm.": "pre_fc_norm_hidden.",
    "post_norm.": "norm.",
}
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""Copies of the model's embedding and head, which published files repeat for each layer."""


@dataclass(frozen=True)
class MtpNames:
    """Names of the `num_layers` layers for multi-token prediction of a model with
    `num_hidden_layers` decoder layers. is_numbered: named as further decoder layers, else
    ``mtp.*``."""

    num_hidden_layers: int
    num_layers: int
    is_numbered: bool

    @staticmethod
    def find(model: Any) -> MtpNames:
        """Return the names of an architecture. Raises ModelError if none is known."""
        names = MtpNames.find_known(model)
        if names is None:
            raise ModelError("transformers reads no names of theirs from files")
        return names

    @staticmethod
    def find_known(model: Any) -> MtpNames | None:
        """Return the names of an architecture; None if none is known."""
        text = model.config.get_text_config()
        num_layers = int(getattr(text, "num_mtp_layers", 0) or 0)
        # Regular expressions, of which one with the number of a layer is found by its text.
        patterns = ignored_keys(model)
        is_numbered = any(re.search(r"layers\\?\.\\?\d", pattern) for pattern in patterns)
        is_single = any(re.match(pattern, f"{NAME}.fc.weight") for pattern in patterns)
        if not num_layers or not (is_numbered or (is_single and num_layers == 1)):
            return None
        return MtpNames(int(text.num_hidden_layers), num_layers, is_numbered)

    def is_one(self, stored: str) -> bool:
        """Return whether a tensor of a file belongs to a layer for multi-token prediction."""
        if not self.is_numbered:
            return stored.startswith(f"{NAME}.")
        layer = re.search(r"(?:^|\.)layers\.(\d+)\.", stored)
        return layer is not None and 0 <= int(layer[1]) - self.num_hidden_layers < self.num_layers

    def repeated(self, stored: str) -> Literal["input", "output"] | None:
        """Return which of the model's embeddings a tensor of a layer for multi-token prediction
        repeats; None for any other tensor."""
        if not self.is_one(stored) or not stored.endswith(_COPIES):
            return None
        return "input" if stored.endswith(_COPIES[0]) else "output"

    def copies(self, table: Literal["input", "output"]) -> list[str]:
        """Return the names under which published files repeat the input or output embedding, which
        vLLM reads for layers for multi-token prediction; empty for files without copies."""
        if not self.is_numbered:
            return []
        end = _COPIES[0] if table == "input" else _COPIES[1]
        first = self.num_hidden_layers
        return [f"model.layers.{first + depth}.{end}" for depth in range(self.num_layers)]

    def as_layer(self, parameter_name: str) -> str:
        """Return the name that a parameter would have in a further decoder layer, by which
        transformers converts it for files; any other `parameter_name` is returned unchanged."""
        match = _OWN.fullmatch(parameter_name)
        if match is None:
            return parameter_name
        return f"model.layers.{self.num_hidden_layers + int(match[1])}.{match[3]}"

    def stored(self, name: str) -> str:
        """Return the name in files of a tensor that `as_layer` named and transformers converted."""
        match = re.fullmatch(r"model\.layers\.(?P<layer>\d+)\.(?P<leaf>.+)", name)
        if match is None:
            return name
        layer, leaf = match["layer"], match["leaf"]
        depth = int(layer) - self.num_hidden_layers
        if depth < 0:
            return name
        stored_layer = f"model.layers.{layer}" if self.is_numbered else NAME
        stored_prefixes = _NUMBERED if self.is_numbered else _SINGLE
        for prefix, stored_prefix in stored_prefixes.items():
            if leaf.startswith(prefix):
                return f"{stored_layer}.{stored_prefix}{leaf.removeprefix(prefix)}"
        return name if self.is_numbered else f"{NAME}.layers.{depth}.{leaf}"


def load_mtp_layers(
    model: Any, layers: MultiTokenLayers, tensors: Mapping[str, torch.Tensor]
) -> list[str]:
    """Let transformers load `tensors` of files into the `layers` of `model`; return the
    problems."""
    mtp_model = layers.mtp_model
    settings = LoadStateDictConfig(
        dtype=torch.float32,
        device_map={"": "cpu"},
        weight_mapping=mtp_model.get_weight_conversions(model),
    )
    with only_errors("transformers"), without_progress():
        info, _ = convert_and_load_state_dict_in_model(mtp_model, dict(tensors), settings, None)
    # Parameters of these layers only: `mtp_model` has the model's embedding and head, too. Before
    # `drop_expected_keys`, since parameters that the class expects to be missing are problems.
    missing = info.missing_keys & layers.state_dict().keys()
    drop_expected_keys(mtp_model, info)
    problems = [
        f"the tensors there of {NAME}.{name} have shape {list(stored_shape)}, the model's "
        f"{list(model_shape)}"
        for name, stored_shape, model_shape in sorted(info.mismatched_keys)
    ]
    problems += [
        f"{NAME}.{name}: cannot be made of the tensors there: {text.strip().splitlines()[-1]}"
        for name, text in sorted(info.conversion_errors.items())
    ]
    wrong = {*info.conversion_errors, *(name for name, *_ in info.mismatched_keys)}
    problems += [
        f"no tensor there is {NAME}.{name} of the layers for multi-token prediction -> "
        "objective.mtp_weight=0 trains without these"
        for name in sorted(missing - wrong)
    ]
    problems += [f"{name}: these layers have none" for name in sorted(info.unexpected_keys)]
    return problems
