"""Isolating documents that share a sample, at run time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from bigtrain.models.layers.document_attention import attend_by_document, per_document_attention
from bigtrain.models.layers.document_masks import document_boundaries, lengths_of_documents
from bigtrain.models.layers.rotary import choose_by_document


@dataclass(frozen=True)
class Isolation:
    """Method by which a model isolates documents.

    none: not at all. masks: transformers makes them from positions. documents: attention runs for
    each document separately, without a mask (`bigtrain.models.layers.document_attention`). lengths:
    flash attention's arguments.
    """

    kind: Literal["none", "masks", "documents", "lengths"]

    @property
    def reason(self) -> str:
        """A human-readable line; empty for none."""
        how = {
            "masks": "by masks that the model makes from positions",
            "documents": "attention runs for each separately, without masks",
            "lengths": "by the lengths that flash attention takes",
        }
        return f"documents of a sample are kept apart: {how[self.kind]}" if self.kind in how else ""

    def install(self, model: PreTrainedModel) -> None:
        """Make `model` isolate documents in this way."""
        if self.kind != "none":
            choose_by_document(model)
        if self.kind == "documents":
            attend_by_document(model)

    @contextmanager
    def document_mask(self, position_ids: torch.Tensor | None) -> Iterator[None]:
        """Enter around every forward pass: `position_ids` [B, T] on the host, full samples; None
        if each sample is one document."""
        if position_ids is None or self.kind != "documents":
            with document_boundaries(packed=position_ids is not None):
                yield
        else:
            with document_boundaries(packed=False), per_document_attention(position_ids):
                yield

    def arguments(self, position_ids: torch.Tensor | None) -> dict[str, Any]:
        """Return arguments for the model in addition to positions; tensors are on the host."""
        if position_ids is None or self.kind != "lengths":
            return {}
        return lengths_of_documents(position_ids)


NOT_ISOLATED = Isolation("none")

MASKED = Isolation("masks")
