"""Equivalence of sequence parallelism and the full sample, tested with threads as ranks.
Convolutions and recurrent layers see beyond the tokens of a rank, and no configuration lists
it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from bigtrain.errors import BigtrainError, ModelError, Problem
from bigtrain.models.configuration import scores_samples, text_config
from bigtrain.models.equivalence.document_isolation import longest_chunk
from bigtrain.models.equivalence.position_numbering import find_numbering, with_uncounted
from bigtrain.models.equivalence.proxy_model import (
    MODEL_FAILURES,
    build_proxy_model,
    check_runs,
    failure_text,
    proxy_tokens,
    rescale_weights,
)
from bigtrain.models.equivalence.reductions import smaller, with_heads
from bigtrain.models.equivalence.token_mixing import mixing_classes
from bigtrain.models.equivalence.trial import (
    LOSS,
    OUTPUT,
    RankThreads,
    RankThreadsOfGroup,
    Tolerance,
    Trial,
    Values,
    run_forward,
)
from bigtrain.models.layers.document_attention import IMPLEMENTATIONS, Isolation
from bigtrain.models.layers.position_embeddings import (
    number_positions,
    numbering_of,
    position_embeddings,
)
from bigtrain.models.layers.recurrence.functions import layers_with_functions
from bigtrain.models.layers.recurrence.pieces import SampleDocuments, documents_in_samples
from bigtrain.models.parallel.sequence import SequenceParallel
from bigtrain.models.parallel.sequence_exchange import SequenceExchange
from bigtrain.models.transformers_patches import attention_name
from bigtrain.settings.compatibility.check import check_model
from bigtrain.settings.compatibility.facts import Facts

TOLERANCES = {OUTPUT: Tolerance(relative=1e-4), LOSS: Tolerance(relative=1e-4)}
"""Far above float32 rounding, far below what one wrong token does."""

_TOKENS_OF_PART = 8
_MOST_TOKENS = 1024
"""Of samples whose parts are longer than what a recurrent layer computes together."""


def check_sequence_parallel(
    hf_config: PreTrainedConfig,
    attention: str,
    size: int,
    *,
    sequence_length: int,
    isolate: bool,
    tensor_size: int = 1,
    ring_size: int = 1,
) -> list[Problem]:
    """Return problems with splitting samples of a model of `hf_config` over `size` ranks, of which
    `ring_size` are a ring; empty if none.

    `sequence_length`: tokens of the samples. `isolate`: documents in a sample are isolated.
    `tensor_size`: tensor-parallel ranks, which divide the attention heads already. Builds a proxy
    model with random weights on the CPU and compares logits. Takes a second or so.
    """
    heads = getattr(text_config(hf_config), "num_attention_heads", None)
    problems = check_model(
        Facts(
            sequence_size=size,
            ring_size=ring_size,
            tensor_size=tensor_size,
            attention_heads=heads if isinstance(heads, int) else None,
        )
    )
    if problems:
        return problems
    model_type = hf_config.model_type
    if scores_samples(hf_config):  # a causal LM's head returns logits for every token
        hf_config = copy.deepcopy(hf_config)
        hf_config.architectures = None
    try:
        model = build_proxy_model(
            hf_config,
            attention,
            smaller(with_heads(2 * size // ring_size)),
            check_runs,
            sequence_length=sequence_length,
            tokens=size * _TOKENS_OF_PART,
        )
        rescale_weights(model).eval()
        number_positions(model, find_numbering(model))
        trial = _trial(model, size, ring_size, isolate=isolate)
        difference = trial.difference(model)
        if ring_size > 1:
            # A ring raises ModelError for attention dropout, which the trial in evaluation mode
            # does not have.
            ids = proxy_tokens(model, size * _TOKENS_OF_PART)
            run_in_parts(model.train(), ids, None, size, ring_size)
        if difference is None:
            return []
        rule = (
            f"splitting the sequence changes the {difference.where} of {model_type} "
            f"({difference.size})"
        )
        if difference.category == OUTPUT:
            rule += f": {_cause(model, size)}"
    except BigtrainError as error:
        rule = str(error)
    except MODEL_FAILURES as error:
        rule = f"a proxy model of {model_type} failed: {failure_text(error)}"
    value = size if ring_size == 1 else {"ulysses": size // ring_size, "ring": ring_size}
    return [Problem("parallel.sequence", value, rule, "parallel.sequence=1")]


def _cause(model: PreTrainedModel, size: int) -> str:
    """Return why parts of a sample have other logits than the full sample."""
    ids = proxy_tokens(model, size * _TOKENS_OF_PART)
    counted = torch.arange(ids.shape[1]).expand(ids.shape)
    own_logits = run_forward(model, input_ids=ids)[OUTPUT]["logits"]
    counted_logits = run_forward(model, input_ids=ids, position_ids=counted)[OUTPUT]["logits"]
    largest_rounding = TOLERANCES[OUTPUT].relative * float(own_logits.abs().max())
    if float((own_logits - counted_logits).abs().max()) > largest_rounding:
        return "its own positions do not count the tokens, and the positions of parts do"
    classes = mixing_classes(model)
    if classes:
        verb = "needs" if len(classes) == 1 else "need"
        return f"{' and '.join(classes)} {verb} the tokens before them, which are on another rank"
    return "something else than its attention needs tokens of other ranks"


def _trial(model: PreTrainedModel, size: int, ring_size: int, *, isolate: bool) -> Trial:
    """Compare full samples with `size` parts that exchange tokens; the control is parts that do not
    exchange tokens."""
    # Longer than what a recurrent layer computes together, so that its state crosses a chunk; short
    # parts where that sample would be too long.
    part_tokens = _TOKENS_OF_PART + longest_chunk(model)
    if part_tokens * size > _MOST_TOKENS:
        part_tokens = _TOKENS_OF_PART
    length = size * part_tokens
    ids = with_uncounted(proxy_tokens(model, length), numbering_of(model))
    positions = torch.arange(length).expand(2, length)
    if isolate:
        # Both samples have a document from token 4 on, the second sample another one of its last 3
        # tokens: boundaries inside parts, and none at their edges.
        positions = positions.clone()
        positions[:, 4:] -= 4
        positions[1, length - 3 :] = torch.arange(3)

    def full(model: PreTrainedModel) -> dict[str, Values]:
        if isolate:  # equal to separate documents, which `find_isolation` has tested
            results = _run_isolated(model, ids, positions)
        else:  # with the model's default positions: some models do not count from 0
            results = run_forward(model, input_ids=ids)
        # Every part must have the loss of the full sample.
        losses = {name: loss.expand(size) for name, loss in results[LOSS].items()}
        return {OUTPUT: results[OUTPUT], LOSS: losses}

    def without_exchange(model: PreTrainedModel) -> dict[str, Values]:
        parts = zip(ids.split(part_tokens, 1), positions.split(part_tokens, 1), strict=True)
        return _joined(
            [
                run_forward(model, input_ids=part_ids, position_ids=part_positions)
                for part_ids, part_positions in parts
            ]
        )

    given_positions = positions if isolate else None
    return Trial(
        full,
        lambda model: run_in_parts(model, ids, given_positions, size, ring_size),
        TOLERANCES,
        without_exchange,
    )


def _run_isolated(
    model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor
) -> dict[str, Values]:
    """Return the results of full samples with isolated documents, computed as in a run: by document
    where the attention supports it (some models make no masks from positions), else by masks."""
    restarts = any(layers_with_functions(model))
    counts = any(position_embeddings(model))
    separate = Isolation("documents", restarts, counts)
    masked = Isolation("masks", restarts, counts)
    isolations = (separate, masked) if attention_name(model) in IMPLEMENTATIONS else (masked,)
    for isolation in isolations:
        undo = isolation.install(model)
        try:
            with isolation.document_mask(positions):
                return run_forward(model, input_ids=ids, position_ids=positions)
        except ModelError:
            if isolation is masked:
                raise
        finally:
            undo()
    raise AssertionError


def run_in_parts(
    model: PreTrainedModel,
    ids: torch.Tensor,
    positions: torch.Tensor | None,
    size: int,
    ring_size: int = 1,
) -> dict[str, Values]:
    """Return the results of `size` threads that act as ranks and divide each sample; rings of
    `ring_size` ranks have equal strides between ranks."""
    # The exchanges of threads as ranks, as `SequenceExchange` orders them.
    threads, ranks, stride = RankThreads(size), range(size), size // ring_size
    neighbors = [ranks[first : first + stride] for first in ranks[::stride]]
    rings = [ranks[offset::stride] for offset in range(stride)]
    exchange = SequenceExchange(
        threads, RankThreadsOfGroup(threads, neighbors), RankThreadsOfGroup(threads, rings)
    )
    sequence = SequenceParallel(model, exchange)
    length = ids.shape[1]
    documents = None if positions is None else SampleDocuments(positions)

    def compute(rank: int) -> tuple[list[tuple[int, int]], dict[str, Values]]:
        with documents_in_samples(documents):
            return sequence.places(length), run_forward(model, **sequence.inputs(ids, positions))

    try:
        parts = threads.run(compute)
    finally:
        sequence.close()
    # The logits in the order of the tokens in the samples.
    joined = _joined([results for _, results in parts])
    order = torch.cat([torch.arange(*span) for spans, _ in parts for span in spans])
    logits = joined[OUTPUT]["logits"][:, order.argsort()]
    return {**joined, OUTPUT: {"logits": logits}}


def _joined(parts: Sequence[Mapping[str, Values]]) -> dict[str, Values]:
    """Return the concatenated logits of the parts, and their stacked auxiliary losses."""
    logits = torch.cat([part[OUTPUT]["logits"] for part in parts], 1)
    losses = {name: torch.stack([part[LOSS][name] for part in parts]) for name in parts[0][LOSS]}
    return {OUTPUT: {"logits": logits}, LOSS: losses}
