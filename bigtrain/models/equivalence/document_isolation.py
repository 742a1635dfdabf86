"""Isolation of packed documents, tested on a proxy model. Some architectures make special masks
(ALiBi, chunks) or have state across tokens (recurrent layers, convolutions), and no configuration
lists it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from bigtrain.errors import ModelError, Problem
from bigtrain.models.equivalence.position_numbering import (
    find_numbering,
    plan_numbering,
    with_uncounted,
)
from bigtrain.models.equivalence.proxy_model import (
    MODEL_FAILURES,
    build_proxy_model,
    check_runs,
    failure_text,
    proxy_tokens,
    rescale_weights,
)
from bigtrain.models.equivalence.reductions import smaller, with_heads
from bigtrain.models.equivalence.trial import OUTPUT, Results, Tolerance, Trial, run_forward
from bigtrain.models.layers.document_attention import (
    MASKED,
    NOT_ISOLATED,
    Isolation,
)
from bigtrain.models.layers.document_masks import PLAIN_NUMBERING, document_attention
from bigtrain.models.layers.position_embeddings import position_embeddings
from bigtrain.models.layers.recurrence.functions import (
    Call,
    layers_with_functions,
    replace_functions,
)
from bigtrain.models.transformers_patches import attention_name
from bigtrain.settings.run_config import RunConfig

TOLERANCES = {OUTPUT: Tolerance(relative=1e-4)}
"""Far above float32 rounding, far below what one wrong token does."""

_DOCUMENT_TOKENS = ((7, 9, 8), (1, 20, 3))


def plan_isolation(
    config: RunConfig, hf_config: PreTrainedConfig
) -> tuple[Isolation, list[Problem]]:
    """Return the document isolation of a run of `config` and the numbering of its positions, and
    problems with them."""
    attention, length = config.model.attention, config.batch.sequence_length
    numbering, problems = plan_numbering(hf_config, attention, length)
    if problems or not config.data.isolates:
        return replace(NOT_ISOLATED, numbering=numbering), problems
    isolation, reason = find_isolation(
        hf_config, attention, length, compiled=config.model.compile == "on"
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
            hf_config,
            attention,
            smaller(with_heads(2)),
            check_runs,
            sequence_length=sequence_length,
        )
        rescale_weights(model).eval()
        implementation = attention_name(model)
        if implementation not in ("sdpa", "eager"):
            return MASKED, f"its attention is {implementation}"
        # A compiled graph would be specialized to the lengths, and recompiled for other lengths.
        methods: list[Literal["lengths", "documents", "masks"]] = ["masks"]
        if attention.startswith("flash"):
            methods = ["lengths"]
        elif attention in ("auto", "sdpa", "eager") and not compiled:
            methods = ["documents", "masks"]
        restarts, numbering = any(layers_with_functions(model)), find_numbering(model)
        plain = [Isolation(method, restarts, numbering=numbering) for method in methods]
        isolation, reason = _first_that_isolates(model, plain)
        if numbering != PLAIN_NUMBERING:
            # The small model has its special tokens at other ids.
            numbering, _ = plan_numbering(hf_config, attention, sequence_length)
            isolation = replace(isolation, numbering=numbering)
        if not reason:
            return isolation, ""
        # The model may count positions itself, and other modules than attention and known functions
        # may mix tokens.
        changes: dict[str, Any] = {"positions": any(position_embeddings(model))}
        if not changes["positions"]:
            from bigtrain.models.equivalence.token_mixing import mixing_classes

            changes = {"modules": mixing_classes(model)}
        if any(changes.values()):
            changed = [replace(isolation, **changes) for isolation in plain]
            isolation, remaining = _first_that_isolates(model, changed)
            if not remaining:
                return isolation, ""
        return MASKED, reason
    except MODEL_FAILURES as error:
        return MASKED, f"its proxy model could not be tested: {failure_text(error)}"


def _first_that_isolates(
    model: PreTrainedModel, isolations: Sequence[Isolation]
) -> tuple[Isolation, str]:
    """Return the first of `isolations` that keeps documents apart, and an empty text; without one
    the last, and why it does not."""
    *earlier, last = isolations
    for isolation in earlier:
        try:
            if not _difference(model, isolation):
                return isolation, ""
        except (ModelError, *MODEL_FAILURES):
            continue
    return last, _difference(model, last)


def _difference(model: PreTrainedModel, isolation: Isolation) -> str:
    """Describe how packed documents differ from separate ones; empty if they do not."""
    # Documents longer than what a recurrent layer computes together, which begin inside of it.
    chunk = longest_chunk(model)
    document_tokens = [
        [length + chunk * (length > 8) for length in row] for row in _DOCUMENT_TOKENS
    ]
    # Documents in samples of their own, packed with isolation, and as a control without isolation.
    ids = with_uncounted(proxy_tokens(model, sum(document_tokens[0])), isolation.numbering)
    positions = torch.stack(
        [torch.cat([torch.arange(length) for length in lengths]) for lengths in document_tokens]
    )

    def separate(model: PreTrainedModel) -> Results:
        rows = [
            torch.cat(
                [
                    run_forward(model, input_ids=document[None])[OUTPUT]["logits"][0]
                    for document in row.split(lengths)
                ]
            )
            for row, lengths in zip(ids, document_tokens, strict=True)
        ]
        return {OUTPUT: {"logits": torch.stack(rows)}}

    def packed(model: PreTrainedModel) -> Results:
        arguments = isolation.arguments(positions)
        with ExitStack() as undo:
            if isolation.method == "lengths":
                undo.enter_context(document_attention(model))
            undo.callback(isolation.install(model))
            undo.enter_context(isolation.document_mask(positions))
            return run_forward(model, input_ids=ids, position_ids=positions, **arguments)

    trial = Trial(separate, packed, TOLERANCES, lambda model: run_forward(model, input_ids=ids))
    difference = trial.difference(model)
    if difference is None:
        return ""
    return (
        f"packed documents are not isolated: their {difference.where} differ from those of the "
        f"separate documents ({difference.size})"
    )


@torch.no_grad()
def longest_chunk(model: PreTrainedModel) -> int:
    """Return the largest number of tokens that a recurrent layer of `model` computes together, 0
    without one."""
    chunks = [0]

    def note(call: Call) -> None:
        chunks.append(call.chunk)

    undo = replace_functions(model, note)
    try:
        run_forward(model, input_ids=proxy_tokens(model))
    finally:
        undo()
    return max(chunks)
