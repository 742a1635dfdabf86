"""Isolation of packed documents, tested on a proxy model. Some architectures make special masks
(ALiBi, chunks) or have state across tokens (recurrent layers, convolutions), and no configuration
lists it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Literal

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from bigtrain.errors import ModelError, Problem
from bigtrain.models.build import empty_model
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
    positions_of_lengths,
    proxy_tokens,
    rescale_weights,
)
from bigtrain.models.equivalence.reductions import smaller, with_heads
from bigtrain.models.equivalence.trial import (
    OUTPUT,
    Results,
    Tolerance,
    Trial,
    Values,
    run_forward,
)
from bigtrain.models.layers.document_attention import (
    MASKED,
    NOT_ISOLATED,
    Isolation,
)
from bigtrain.models.layers.document_masks import PLAIN_NUMBERING, document_attention
from bigtrain.models.layers.position_embeddings import position_embeddings
from bigtrain.models.layers.recurrence.functions import (
    SEGMENT_TOKENS,
    Call,
    layers_with_functions,
    replace_functions,
)
from bigtrain.models.transformers_patches import attention_name
from bigtrain.settings.run_config import RunConfig

TOLERANCES = {OUTPUT: Tolerance(relative=1e-4)}
"""Far above float32 rounding, far below what one wrong token does."""

_DOCUMENT_TOKENS = ((7, 9, 8), (1, 20, 3))
_LONGEST_SAMPLE = 4096
"""Tokens of a long sample on a CPU, with masks of all pairs of tokens."""


def plan_isolation(
    config: RunConfig, hf_config: PreTrainedConfig
) -> tuple[Isolation, list[Problem]]:
    """Return the document isolation of a run of `config` and the numbering of its positions, and
    problems with them."""
    attention, length = config.model.attention, config.batch.sequence_length
    numbering, problems = plan_numbering(hf_config, attention, length)
    if problems or not config.data.isolates:
        is_long = length > SEGMENT_TOKENS and any(layers_with_functions(empty_model(hf_config)))
        return replace(NOT_ISOLATED, restarts=is_long, numbering=numbering), problems
    isolation, reason = find_isolation(hf_config, attention, length)
    if not reason:
        return isolation, []
    rule = f"is not supported for model_type {hf_config.model_type}: {reason}"
    key, value, remedy = "data.document_boundaries", "isolate", "data.document_boundaries=ignore"
    if config.data.packing == "best_fit":
        key, value, remedy = "data.packing", "best_fit", "data.packing=concatenate"
    return MASKED, [Problem(key, value, rule, f"set {remedy}, or choose another architecture")]


def find_isolation(
    hf_config: PreTrainedConfig, attention: str, sequence_length: int
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
        methods: list[Literal["lengths", "documents", "masks"]] = ["masks"]
        if attention.startswith("flash"):
            methods = ["lengths"]
        elif attention in ("auto", "sdpa", "eager"):
            methods = ["documents", "masks"]
        restarts, numbering = any(layers_with_functions(model)), find_numbering(model)
        plain = [Isolation(method, restarts, numbering=numbering) for method in methods]
        isolation, reason = _first_that_isolates(model, plain)
        if reason:
            may_overlay = attention in ("auto", "sdpa", "eager")
            changed = _with_changes(model, plain, overlays=may_overlay) or plain[-1:]
            isolation, remaining_reason = _first_that_isolates(model, changed)
            if remaining_reason:
                return MASKED, f"{reason}{_leak(model, isolation)}"
            if isolation.overlays:
                reason = _leak_of_long_sample(hf_config, attention, sequence_length, isolation)
                if reason:
                    return MASKED, reason
        if numbering != PLAIN_NUMBERING:
            # The small model has its special tokens at other ids.
            numbering, _ = plan_numbering(hf_config, attention, sequence_length)
        return replace(isolation, numbering=numbering), ""
    except MODEL_FAILURES as error:
        return MASKED, f"its proxy model could not be tested: {failure_text(error)}"


def _with_changes(
    model: PreTrainedModel, isolations: Sequence[Isolation], *, overlays: bool
) -> list[Isolation]:
    """Return `isolations` with more changes of `model`. `overlays`: whether masks are made that
    documents can be added to."""
    # The model may count positions itself, and make masks without positions.
    counts = any(position_embeddings(model))
    changed = [replace(isolation, positions=True) for isolation in isolations if counts]
    if overlays:
        changed.append(replace(isolations[-1], positions=counts, overlays=True))
    # Other modules than attention and known functions may mix tokens.
    if not counts:
        from bigtrain.models.equivalence.token_mixing import mixing_classes

        modules = mixing_classes(model)
        changed += [replace(isolation, modules=modules) for isolation in isolations if modules]
    return changed


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
    document_tokens = _document_tokens(model)
    # Documents in samples of their own, packed with isolation, and as a control without isolation.
    ids = with_uncounted(proxy_tokens(model, sum(document_tokens[0])), isolation.numbering)

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

    trial = Trial(
        separate,
        lambda model: _run_packed(model, isolation, ids, document_tokens),
        TOLERANCES,
        lambda model: run_forward(model, input_ids=ids),
    )
    difference = trial.difference(model)
    if difference is None:
        return ""
    return (
        f"packed documents are not isolated: their {difference.where} differ from those of the "
        f"separate documents ({difference.size})"
    )


def _leak(model: PreTrainedModel, isolation: Isolation) -> str:
    """Return what distinguishes packed documents that are isolated in this way from separate
    documents, after a colon; empty if it cannot be tested."""
    try:
        if _depends_on_earlier(model, isolation, _document_tokens(model)):
            return ": tokens attend to the documents before theirs"
    except (ModelError, *MODEL_FAILURES):
        return ""
    return ": positions in a document depend on the tokens before it"


def _leak_of_long_sample(
    hf_config: PreTrainedConfig, attention: str, sequence_length: int, isolation: Isolation
) -> str:
    """Return why documents in samples of `sequence_length` are not isolated; empty if they are.

    A model that does not take attention from transformers' registry may use masks in short samples
    only (BigBird's sparse attention), and may compute all samples as the first one that it gets."""

    def unused(_: PreTrainedModel) -> None: ...

    length = min(sequence_length, _LONGEST_SAMPLE)
    reductions = smaller(with_heads(2))
    model = build_proxy_model(
        hf_config, attention, reductions, unused, sequence_length=sequence_length
    )
    rescale_weights(model).eval()
    if not _depends_on_earlier(model, isolation, [[length // 3, length - length // 3]]):
        return ""
    return (
        f"packed documents are not isolated in samples of {length} tokens: tokens attend to the "
        "documents before theirs"
    )


def _depends_on_earlier(
    model: PreTrainedModel, isolation: Isolation, document_tokens: Sequence[Sequence[int]]
) -> bool:
    """Return whether logits of the second document and later ones depend on the first document of
    a sample. `document_tokens`: tokens of each sample's documents."""
    ids, other_ids = (proxy_tokens(model, sum(document_tokens[0]), seed) for seed in (0, 1))
    logits = []
    for first_ids in (ids, other_ids):
        rows = [
            torch.cat([first_row[: lengths[0]], row[lengths[0] :]])
            for first_row, row, lengths in zip(first_ids, ids, document_tokens, strict=False)
        ]
        results = _run_packed(model, isolation, torch.stack(rows), document_tokens)
        logits.append(results[OUTPUT]["logits"])
    largest_rounding = TOLERANCES[OUTPUT].relative * float(logits[0].abs().max())
    differences = [
        float((row - other_row)[lengths[0] :].abs().max())
        for row, other_row, lengths in zip(*logits, document_tokens, strict=True)
    ]
    return max(differences) > largest_rounding


def _document_tokens(model: PreTrainedModel) -> list[list[int]]:
    """Return the tokens of the documents of two samples of the trial. Documents are longer than
    what a recurrent layer computes together, and begin inside a chunk."""
    chunk = longest_chunk(model)
    return [[length + chunk * (length > 8) for length in row] for row in _DOCUMENT_TOKENS]


def _run_packed(
    model: PreTrainedModel,
    isolation: Isolation,
    ids: torch.Tensor,
    document_tokens: Sequence[Sequence[int]],
) -> dict[str, Values]:
    """Return the results of samples `ids` of isolated documents."""
    positions = positions_of_lengths(document_tokens)
    arguments = isolation.arguments(positions)
    with ExitStack() as undo:
        if isolation.method == "lengths":
            undo.enter_context(document_attention(model))
        undo.callback(isolation.install(model))
        undo.enter_context(isolation.document_mask(positions))
        return run_forward(model, input_ids=ids, position_ids=positions, **arguments)


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
