"""Whether a model keeps documents apart that share a sample: tried on a small copy of it.

transformers sees from ``position_ids`` which start anew where documents begin, and builds a
block-diagonal causal mask (``masking_utils.find_packed_sequence_indices``). That is up to every
architecture's own code: some take no positions (ALiBi), some have state that runs through
(recurrent layers, convolutions), and nothing says so. So it is tried, not looked up.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from bigtrain.errors import Problem
from bigtrain.models.documents import document_attention, lengths_of_documents
from bigtrain.models.small_copy import MODEL_FAILURES, VOCABULARY, small_copy, with_heads

TOLERANCE = 1e-4
"""Of the largest logit: far above float32 rounding, far below what one wrong token does."""

_DOCUMENT_TOKENS = ((7, 9, 8), (1, 20, 3))


def check_isolation(hf_config: PreTrainedConfig, attention: str) -> list[Problem]:
    """Problems with isolating documents in a model of `hf_config`; empty where it is shown to hold.

    Builds a few narrow layers of it with random weights on the CPU and compares the logits of two
    samples of three documents each with those of the six documents alone. Takes a second or so.
    """
    try:
        by_lengths = attention.startswith("flash")
        # Kernels that a CPU does not have get masks and lengths from the same code.
        model = _small_model(hf_config, attention if attention in ("sdpa", "eager") else "auto")
        if model.config._attn_implementation not in ("sdpa", "eager"):
            return [_refusal(hf_config, f"its attention is {model.config._attn_implementation}")]
        with document_attention(model) if by_lengths else nullcontext():
            alone, packed, mixed = _logits(model, by_lengths=by_lengths)
    except MODEL_FAILURES as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        return [_refusal(hf_config, f"a small copy of it could not be tried: {reason}")]
    limit = TOLERANCE * float(alone.abs().max())
    if not float((mixed - alone).abs().max()) > 10 * limit:
        return [_refusal(hf_config, "random weights do not show whether documents see each other")]
    difference = float((packed - alone).abs().max())
    if not difference <= limit:
        return [
            _refusal(
                hf_config,
                "it does not: documents that share a sample have other logits than alone (by "
                f"{difference:.2g}, rounding is below {limit:.2g})",
            )
        ]
    return []


def _refusal(hf_config: PreTrainedConfig, reason: str) -> Problem:
    return Problem(
        "data.document_boundaries",
        "isolate",
        f"cannot be had of model_type {hf_config.model_type}: {reason}",
        "set data.document_boundaries=ignore, or take another architecture",
    )


@torch.no_grad()
def _logits(
    model: PreTrainedModel, *, by_lengths: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [B, T, V] of documents alone, of samples with boundaries, and of samples without.

    by_lengths: boundaries are told as flash attention is, besides by positions.
    """
    rows = len(_DOCUMENT_TOKENS)
    tokens = sum(_DOCUMENT_TOKENS[0])
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, VOCABULARY, (rows, tokens), generator=generator)
    positions = torch.stack(
        [torch.cat([torch.arange(length) for length in lengths]) for lengths in _DOCUMENT_TOKENS]
    )
    alone = torch.stack(
        [
            torch.cat(
                [
                    model(input_ids=document[None], use_cache=False).logits[0]
                    for document in ids[row].split(list(lengths))
                ]
            )
            for row, lengths in enumerate(_DOCUMENT_TOKENS)
        ]
    )
    lengths = lengths_of_documents(positions) if by_lengths else {}
    packed = model(input_ids=ids, position_ids=positions, use_cache=False, **lengths).logits
    mixed = model(input_ids=ids, use_cache=False).logits
    return alone, packed, mixed


def _small_model(hf_config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    return small_copy(hf_config, attention, [with_heads(2)]).eval()
