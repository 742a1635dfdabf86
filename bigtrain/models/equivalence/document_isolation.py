"""Isolation of packed documents, tested on a proxy model: no configuration says that an
architecture makes special masks (ALiBi, chunks), or has state across tokens (recurrent layers,
convolutions)."""

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
"""Far above float32 rounding, far below the effect of one wrong token."""

_DOCUMENT_LENGTHS = ((7, 9, 8), (1, 20, 3))
"""Tokens of the documents of each sample."""
_LONGEST_SAMPLE = 4096
"""Largest number of tokens of a sample on a CPU, with masks of all pairs of tokens."""


def plan_isolation(
    config: RunConfig, hf_config: PreTrainedConfig
) -> tuple[Isolation, list[Problem]]:
    """Return the document isolation and the numbering of positions of a run of `config`, and
    problems with both."""
    attention, sequence_length = config.model.attention, config.batch.sequence_length
    numbering, problems = plan_numbering(hf_config, attention, sequence_length)
    if problems or not config.data.isolates:
        # Recurrent layers compute long samples in segments also without isolation.
        has_segments = sequence_length > SEGMENT_TOKENS and any(
            layers_with_functions(empty_model(hf_config))
        )
        return replace(NOT_ISOLATED, restarts=has_segments, numbering=numbering), problems
    isolation, reason = find_isolation(hf_config, attention, sequence_length)
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
    """Return how a model of `hf_config` isolates documents in samples of `sequence_length`, and why
    it cannot (empty if it can).

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
        candidates = [Isolation(method, restarts, numbering=numbering) for method in methods]
        isolation, reason = _choose_isolation(model, candidates)
        if reason:
            may_overlay = attention in ("auto", "sdpa", "eager")
            further = _further_isolations(model, candidates, overlays=may_overlay)
            isolation, remaining_reason = _choose_isolation(model, further or candidates[-1:])
            if remaining_reason:
                return MASKED, f"{reason}{_leak_text(model, isolation)}"
            if isolation.overlays:
                reason = _long_sample_failure(hf_config, attention, sequence_length, isolation)
                if reason:
                    return MASKED, reason
        if numbering != PLAIN_NUMBERING:
            # The numbering depends on ids of special tokens, which the proxy model changes.
            numbering, _ = plan_numbering(hf_config, attention, sequence_length)
        return replace(isolation, numbering=numbering), ""
    except MODEL_FAILURES as error:
        return MASKED, f"its proxy model could not be tested: {failure_text(error)}"


def _further_isolations(
    model: PreTrainedModel, isolations: Sequence[Isolation], *, overlays: bool
) -> list[Isolation]:
    """Return `isolations` with further changes of `model`. `overlays`: whether the model's
    attention uses masks, to which documents can be added."""
    # The model may count positions itself, and make masks without positions.
    counts_positions = any(position_embeddings(model))
    further = []
    if counts_positions:
        further += [replace(isolation, positions=True) for isolation in isolations]
    if overlays:
        further.append(replace(isolations[-1], positions=counts_positions, overlays=True))
    # Other modules than attention and known functions may mix tokens.
    if not counts_positions:
        from bigtrain.models.equivalence.token_mixing import mixing_classes

        if modules := mixing_classes(model):
            further += [replace(isolation, modules=modules) for isolation in isolations]
    return further


def _choose_isolation(
    model: PreTrainedModel, isolations: Sequence[Isolation]
) -> tuple[Isolation, str]:
    """Return the first of `isolations` that keeps documents apart, and an empty text; if none does,
    the last, and why it fails."""
    *earlier, last = isolations
    for isolation in earlier:
        try:
            if not _isolation_failure(model, isolation):
                return isolation, ""
        except (ModelError, *MODEL_FAILURES):
            continue
    return last, _isolation_failure(model, last)


def _isolation_failure(model: PreTrainedModel, isolation: Isolation) -> str:
    """Return how packed documents differ from separate documents; empty if they are equal."""
    document_lengths = _trial_lengths(model)
    # Separate documents are compared with packed documents, isolated and (control) not isolated.
    ids = with_uncounted(proxy_tokens(model, sum(document_lengths[0])), isolation.numbering)

    def separate(model: PreTrainedModel) -> Results:
        samples = []
        for row, lengths in zip(ids, document_lengths, strict=True):
            results = [run_forward(model, input_ids=part[None]) for part in row.split(lengths)]
            samples.append(torch.cat([result[OUTPUT]["logits"][0] for result in results]))
        return {OUTPUT: {"logits": torch.stack(samples)}}

    trial = Trial(
        separate,
        lambda model: _run_packed(model, isolation, ids, document_lengths),
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


def _leak_text(model: PreTrainedModel, isolation: Isolation) -> str:
    """Return by what the tokens before a document change it under `isolation`, after a colon; empty
    if a test raises an error."""
    try:
        if _depends_on_earlier(model, isolation, _trial_lengths(model)):
            return ": tokens attend to the documents before theirs"
    except (ModelError, *MODEL_FAILURES):
        return ""
    return ": positions in a document depend on the tokens before it"


def _long_sample_failure(
    hf_config: PreTrainedConfig, attention: str, sequence_length: int, isolation: Isolation
) -> str:
    """Return why documents in samples of `sequence_length` are not isolated; empty if they are.

    A model that does not take attention from transformers' registry may use masks in short samples
    only (BigBird's sparse attention), and may compute all samples like the first sample."""

    # The first sample of this model has to be a long sample, so no sample tests the model before.
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
    model: PreTrainedModel, isolation: Isolation, document_lengths: Sequence[Sequence[int]]
) -> bool:
    """Return whether the logits of the second and later documents depend on the first document of
    a sample. `document_lengths`: numbers of tokens of each sample's documents."""
    first_lengths = [lengths[0] for lengths in document_lengths]
    ids, other_ids = (proxy_tokens(model, sum(document_lengths[0]), seed) for seed in (0, 1))
    # Compute the logits of samples with equal tokens except for the first documents.
    logits = []
    for ids_of_first in (ids, other_ids):
        rows = [
            torch.cat([first_row[:first_length], row[first_length:]])
            for first_row, row, first_length in zip(ids_of_first, ids, first_lengths, strict=False)
        ]
        results = _run_packed(model, isolation, torch.stack(rows), document_lengths)
        logits.append(results[OUTPUT]["logits"])
    largest_rounding = TOLERANCES[OUTPUT].relative * float(logits[0].abs().max())
    differences = [
        float((row - other_row)[first_length:].abs().max())
        for row, other_row, first_length in zip(*logits, first_lengths, strict=True)
    ]
    return max(differences) > largest_rounding


def _trial_lengths(model: PreTrainedModel) -> list[list[int]]:
    """Return the numbers of tokens of the documents of two samples. A long document in each sample
    has more tokens than a chunk of recurrent layers, and documents begin inside a chunk."""
    chunk = longest_chunk(model)
    return [
        [length + chunk if length > 8 else length for length in lengths]
        for lengths in _DOCUMENT_LENGTHS
    ]


def _run_packed(
    model: PreTrainedModel,
    isolation: Isolation,
    ids: torch.Tensor,
    document_lengths: Sequence[Sequence[int]],
) -> dict[str, Values]:
    """Return the results of samples `ids` with packed documents under `isolation`."""
    positions = positions_of_lengths(document_lengths)
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
    chunk_sizes = [0]

    def record_chunk(call: Call) -> None:
        chunk_sizes.append(call.chunk)

    undo = replace_functions(model, record_chunk)
    try:
        run_forward(model, input_ids=proxy_tokens(model))
    finally:
        undo()
    return max(chunk_sizes)
