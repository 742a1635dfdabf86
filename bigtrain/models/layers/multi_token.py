"""Layers for multi-token prediction (arXiv 2412.19437, section 2.2), built by transformers'
`MtpModel` and run without a cache.

Layer k (from 1) predicts the token k + 1 positions after a hidden state: its input is the output of
layer k - 1 (of the model, for k = 1) at position t, and the embedding of token t + k. Embedding and
head are the model's. Shapes: B = samples, T = tokens of a sample, H = hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import MtpModel

from bigtrain.errors import ModelError, one_line
from bigtrain.models.configuration import num_trained_mtp_layers
from bigtrain.models.layers.document_masks import document_numbers
from bigtrain.models.layers.token_loss import IGNORED_LABEL
from bigtrain.models.transformers_patches import follow_implementations

NAME = "mtp"
"""Attribute of a model under which it has these layers."""


class MultiTokenLayers(nn.Module):
    """Layers for multi-token prediction of `model`, constructed in its dtype. `num_layers`: their
    number. Raises ModelError if transformers cannot build them for the architecture, or not with
    the model's embedding."""

    def __init__(self, model: PreTrainedModel, num_layers: int) -> None:
        super().__init__()
        try:
            default_dtype = torch.get_default_dtype()
            torch.set_default_dtype(model.dtype)
            try:
                mtp_model: Any = MtpModel(model, num_layers)
            finally:
                torch.set_default_dtype(default_dtype)
        except (ValueError, AttributeError, TypeError) as error:
            raise ModelError(f"transformers does not build them: {one_line(error)}") from error
        if mtp_model.embed_tokens is not model.get_input_embeddings():
            raise ModelError("transformers gives them an embedding of their own")
        self.layers: nn.ModuleList = mtp_model.layers
        if mtp_model.use_shared_post_norm:
            self.shared_post_norm: nn.Module = mtp_model.shared_post_norm
        # In a tuple, since `mtp_model` also has the model's embedding and head, which must keep one
        # name.
        self._mtp_model = (mtp_model,)

    @property
    def mtp_model(self) -> Any:
        """transformers' model of the layers, with the embedding and head of the main model."""
        return self._mtp_model[0]

    def hidden_states(
        self,
        model: PreTrainedModel,
        hidden: torch.Tensor,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        **options: Any,
    ) -> Iterator[torch.Tensor]:
        """Yield the hidden states [B, T, H] of every layer, from the hidden states `hidden` of
        `model`, for `input_ids` [B, T]. The last k positions of layer k have no token to embed:
        they get tokens from the beginning of the sample, and must have no label. `position_ids`
        int64 [B, T]; `options`: further arguments of a layer."""
        follow_implementations(self.mtp_model, model)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        for index in range(len(self.layers)):
            depth = index + 1
            # In generation, too, layers run at the positions of the tokens that they embed.
            hidden = self.mtp_model.forward_layer(
                index,
                hidden,
                position_ids + depth,
                None,
                input_ids=input_ids.roll(-depth, dims=1),
                **options,
            )
            yield hidden


def add_mtp_layers(model: PreTrainedModel, hf_config: PreTrainedConfig) -> None:
    """Give `model` the layers that a run with `hf_config` trains, if any. Raises
    ModelError as `MultiTokenLayers`."""
    if count := num_trained_mtp_layers(hf_config):
        model.add_module(NAME, MultiTokenLayers(model, count))


def mtp_layers(model: nn.Module) -> MultiTokenLayers | None:
    """Return the layers that `add_mtp_layers` added; None if it added none."""
    layers = getattr(model, NAME, None)
    return layers if isinstance(layers, MultiTokenLayers) else None


def labels_at_depth(
    labels: torch.Tensor, depth: int, position_ids: torch.Tensor | None
) -> torch.Tensor:
    """Return the labels of layer `depth` (from 1): int64 like `labels` [B, T], which are the labels
    of the next token. -100 where that label is -100, beyond the end of the sample and, with
    `position_ids` of isolated documents, beyond the end of the document."""
    shifted = F.pad(labels[:, depth:], (0, depth), value=IGNORED_LABEL)
    if position_ids is None:
        return shifted
    documents = document_numbers(position_ids)
    is_same = documents == F.pad(documents[:, depth:], (0, depth), value=-1)
    return shifted.masked_fill(~is_same, IGNORED_LABEL)
