"""Isolation of packed documents, tested on a proxy model. Some architectures make special masks
(ALiBi, chunks) or have state across tokens (recurrent layers, convolutions), and no configuration
lists it."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from bigtrain.errors import ModelError, Problem
from bigtrain.models.equivalence.proxy_model import (
    MODEL_FAILURES,
    build_proxy_model,
    failure_text,
    proxy_tokens,
    rescale_weights,
)
from bigtrain.models.equivalence.reductions import with_heads
from bigtrain.models.equivalence.trial import OUTPUT, Results, Tolerance, Trial, run_forward
from bigtrain.models.layers.document_attention import (
    MASKED,
    NOT_ISOLATED,
    Isolation,
    attend_by_document,
)
from bigtrain.models.layers.document_masks import document_attention
from bigtrain.models.layers.rotary import choose_by_document
from bigtrain.models.transformers_patches import attention_name
from bigtrain.settings.run_config import RunConfig

TOLERANCES = {OUTPUT: Tolerance(relative=1e-4)}
"""Far above float32 rounding, far below what one wrong token does."""

_DOCUMENT_TOKENS = ((7, 9, 8), (1, 20, 3))


def plan_isolation(
    config: RunConfig, hf_config: PreTrainedConfig
) -> tuple[Isolation, list[Problem]]:
    """Return the document isolation of a run of `config`, and problems with it."""
    if not config.data.isolates:
        return NOT_ISOLATED, []
    isolation, reason = find_isolation(
        hf_config,
        config.model.attention,
        config.batch.sequence_length,
        compiled=config.model.compile != "off",
    )
    if not reason:
        return isolation, []
    rule = f"is not supported for model_type {hf_config.model_type}: {reason}"
    key, value, remedy = "data.document_boundaries", "isolate", "data.document_boundaries=ignore"
    if config.data.packing == "best_fit":
        key, value, remedy = "data.packing", "best_fit", "data.packing=concatenate"
    return MASKED, [Problem(key, value, rule, f"set {remedy}, or choose another architecture")]


def find_isolation(
    hf_config: PreTrainedConfig, attention: str, sequence_length: int, *, compiled: bool = False
) -> tuple[Isolation, str]:
    """Return how documents of `hf_config` are isolated in samples of `sequence_length`, and why
    they cannot be (empty if they are).

    Builds a proxy model with random weights on the CPU and compares the logits of two samples of
    three documents each with the logits of the six separate documents. Takes a second or so.
    """
    try:
        # A CPU lacks GPU kernels, but masks and lengths come from the same code on both.
        model = build_proxy_model(
            hf_config, attention, [with_heads(2)], sequence_length=sequence_length
        )
        rescale_weights(model).eval()
        implementation = attention_name(model)
        if implementation not in ("sdpa", "eager"):
            return MASKED, f"its attention is {implementation}"
        if attention.startswith("flash"):
            lengths = Isolation("lengths")
            with document_attention(model):
                return lengths, _difference(model, lengths)
        # A compiled graph would be specialized to the lengths, and recompiled for other lengths.
        if attention in ("auto", "sdpa", "eager") and not compiled:
            documents = Isolation("documents")
            undo = attend_by_document(model)
            try:
                reason = _difference(model, documents)
            except (ModelError, *MODEL_FAILURES) as error:
                reason = str(error)
            if not reason:
                return documents, ""
            undo()
        return MASKED, _difference(model, MASKED)
    except MODEL_FAILURES as error:
        return MASKED, f"its proxy model could not be tested: {failure_text(error)}"


def _difference(model: PreTrainedModel, isolation: Isolation) -> str:
    """Describe how packed documents differ from separate ones; empty if they do not."""
    # Documents in samples of their own, packed with isolation, and as a control without isolation.
    ids = proxy_tokens(model, sum(_DOCUMENT_TOKENS[0]))
    positions = torch.stack(
        [torch.cat([torch.arange(length) for length in lengths]) for lengths in _DOCUMENT_TOKENS]
    )

    def separate(model: PreTrainedModel) -> Results:
        rows = [
            torch.cat(
                [
                    run_forward(model, input_ids=document[None])[OUTPUT]["logits"][0]
                    for document in row.split(list(lengths))
                ]
            )
            for row, lengths in zip(ids, _DOCUMENT_TOKENS, strict=True)
        ]
        return {OUTPUT: {"logits": torch.stack(rows)}}

    def packed(model: PreTrainedModel) -> Results:
        arguments = isolation.arguments(positions)
        undo = choose_by_document(model)
        try:
            with isolation.document_mask(positions):
                return run_forward(model, input_ids=ids, position_ids=positions, **arguments)
        finally:
            undo()

    trial = Trial(separate, packed, TOLERANCES, lambda model: run_forward(model, input_ids=ids))
    difference = trial.difference(model)
    if difference is None:
        return ""
    return (
        f"packed documents are not isolated: their {difference.where} differ from those of the "
        f"separate documents ({difference.size})"
    )
