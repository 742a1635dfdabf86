"""Numbering of positions by a model that is given none, found on a proxy model: rows of embeddings
that the model looks up without positions are compared with rows for positions from 0."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

from bigtrain.errors import Problem
from bigtrain.models.build import empty_model
from bigtrain.models.configuration import text_config
from bigtrain.models.equivalence.proxy_model import (
    MODEL_FAILURES,
    TOKENS,
    build_proxy_model,
    check_runs,
    proxy_tokens,
)
from bigtrain.models.equivalence.reductions import smaller, with_heads
from bigtrain.models.layers.document_masks import PLAIN_NUMBERING, PositionNumbering
from bigtrain.settings.compatibility.check import check_model
from bigtrain.settings.compatibility.facts import Facts

_UNCOUNTED_EVERY = 5
"""Tokens of samples of which one is not counted."""


def plan_numbering(
    hf_config: PreTrainedConfig, attention: str, sequence_length: int
) -> tuple[PositionNumbering, list[Problem]]:
    """Return the numbering of a model of `hf_config`, and the problem with samples of
    `sequence_length` tokens for which tables of positions are too short. For a model with tables
    builds a proxy model, which keeps the padding and the rows of the tables."""
    is_embedding = [isinstance(m, nn.Embedding) for m in empty_model(hf_config).modules()]
    if sum(is_embedding) < 2:  # of tokens only
        return PLAIN_NUMBERING, []
    padding = getattr(text_config(hf_config), "pad_token_id", None)

    def with_padding(config: Any) -> None:
        with_heads(2)(config)
        if isinstance(padding, int) and padding >= 0:
            config.pad_token_id = padding
            config.vocab_size = max(config.vocab_size, padding + 1)

    try:
        model = build_proxy_model(
            hf_config,
            attention,
            smaller(with_padding),
            check_runs,
            sequence_length=TOKENS,  # positions do not depend on the length
        ).eval()
    except ValueError:  # the trials of the model give the reason
        return PLAIN_NUMBERING, []
    numbering, num_positions = find_numbering(model), _num_positions(model)
    longest = getattr(text_config(hf_config), "max_position_embeddings", None)
    if num_positions is None or not isinstance(longest, int) or longest <= 0:
        return numbering, []
    facts = Facts(
        sequence_length=sequence_length,
        max_positions=longest,
        unused_positions=max(0, longest - num_positions),
    )
    return numbering, check_model(facts)


@torch.no_grad()
def find_numbering(model: PreTrainedModel) -> PositionNumbering:
    """Return the numbering with which `model` looks up equal rows of embeddings with and without
    positions; the plain numbering if none does: trials of the model find the difference."""
    ids, padding = _tokens_and_padding(model)
    counted = torch.arange(ids.shape[1]).expand(ids.shape)
    try:
        rows = [rows for rows, _ in _lookups(model, input_ids=ids)]
        given_rows = [rows for rows, _ in _lookups(model, input_ids=ids, position_ids=counted)]
        if len(rows) != len(given_rows):
            return PLAIN_NUMBERING
        offsets = {
            offset
            for own_rows, counted_rows in zip(rows, given_rows, strict=True)
            for offset in (own_rows - counted_rows).flatten().tolist()
            if not torch.equal(own_rows.expand_as(counted_rows), counted_rows)
        }
        if len(offsets) > 1:
            return PLAIN_NUMBERING
        first = next(iter(offsets), 0)
        # Tokens of the padding may not be counted.
        candidates = [PositionNumbering(first)]
        if padding is not None:
            candidates.append(PositionNumbering(first, padding))
        ids = with_uncounted(ids, candidates[-1])
        rows = [rows for rows, _ in _lookups(model, input_ids=ids)]
        for numbering in candidates:
            numbers = numbering.numbers(ids, counted)
            given_rows = [rows for rows, _ in _lookups(model, input_ids=ids, position_ids=numbers)]
            pairs = zip(rows, given_rows, strict=False)
            if all(bool((rows == own_rows).all()) for own_rows, rows in pairs):
                return numbering
    except MODEL_FAILURES:
        pass
    return PLAIN_NUMBERING


def with_uncounted(ids: torch.Tensor, numbering: PositionNumbering) -> torch.Tensor:
    """Return `ids` [B, T], with tokens that `numbering` does not count if it counts not all."""
    if numbering.uncounted is None:
        return ids
    ids = ids.clone()
    for sample, row in enumerate(ids):
        row[2 + sample :: _UNCOUNTED_EVERY] = numbering.uncounted
    return ids


def _tokens_and_padding(model: PreTrainedModel) -> tuple[torch.Tensor, int | None]:
    """Return tokens without the padding of `model`, and the padding; None if there is none."""
    ids = proxy_tokens(model)
    padding = getattr(text_config(model.config), "pad_token_id", None)
    if not isinstance(padding, int) or padding < 0:
        return ids, None
    # The smallest ids are special tokens, too.
    largest = int(ids[ids != padding].max())
    return ids.masked_fill(ids == padding, largest), padding


@torch.no_grad()
def _num_positions(model: PreTrainedModel) -> int | None:
    """Return how many positions fit, from the first used row on, in the smallest table whose rows
    `model` looks up consecutively; None without a table."""
    ids, _ = _tokens_and_padding(model)
    counted = torch.arange(ids.shape[1])
    sizes = []
    for rows, num_rows in _lookups(model, input_ids=ids):
        has_tokens = rows.shape[-1:] == counted.shape
        if has_tokens and torch.equal(rows, rows[..., :1] + counted):
            sizes.append(num_rows - int(rows.flatten()[0]))  # rows before the first are never used
    return min(sizes, default=None)


def _lookups(model: PreTrainedModel, **inputs: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
    """Return the rows that `model` looks up in each embedding for `inputs`, and the number of rows
    that the embedding has, in the order of the lookups."""
    mode = _Lookups()
    with mode:
        model(**inputs, use_cache=False)
    return mode.lookups


class _Lookups(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.lookups: list[tuple[torch.Tensor, int]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See `torch.overrides.TorchFunctionMode`."""
        if func is F.embedding:
            rows, weight = args[:2]
            self.lookups.append((rows, len(weight)))
        return func(*args, **(kwargs or {}))
