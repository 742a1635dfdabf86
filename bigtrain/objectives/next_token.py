"""Cross-entropy of the next token. Pure."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from bigtrain.objectives.kind import ObjectiveFields, ObjectiveKind
from bigtrain.settings.sections.base import NonNegativeFloat


class SmoothingFields(ObjectiveFields):
    """Field of next_token, and of losses of preferences."""

    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """next_token: share of each target that is divided equally over the vocabulary (arXiv
    1512.00567), in training only; preference with sigmoid, robust or exo_pair: share of the pairs
    whose preference is wrong, below 0.5"""


class NextTokenFields(SmoothingFields):
    """Fields of next_token."""

    z_loss: NonNegativeFloat = 0.0
    """next_token: weight of the squared logarithm of the softmax's denominator, which keeps the
    logits small (PaLM: 1e-4, arXiv 2204.02311), in training only"""
    mtp_weight: NonNegativeFloat = 0.0
    """next_token: weight of the loss of the multi-token-prediction layers that the model's
    configuration counts (num_nextn_predict_layers), in training only; DeepSeek-V3: 0.3, later 0.1
    (arXiv 2412.19437), Megatron-LM: 0.1; 0 neither builds nor trains these layers"""


class NextToken(ObjectiveKind[NextTokenFields]):
    """Cross-entropy of the next token, with the terms of its fields."""

    name = "next_token"
    summary = "cross-entropy of the next token"
    fields = NextTokenFields
    loss = "bigtrain.objectives.losses.next_token:NextTokenLoss"
    is_next_token = True
