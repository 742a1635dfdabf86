"""Document boundaries in the form that masks and flash attention take, and numbers of positions.
Variable-length flash kernels take all tokens of a micro-batch in one row and document starts
(``cu_seqlens``); transformers flattens the rows (`_flash_attention_forward`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    causal_mask_function,
    packed_sequence_mask_function,
)

from bigtrain.models.transformers_patches import attention_name, packed_sequences_found_by

_NAME = "bigtrain_documents"


def edges_of_documents(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the start of every document in the tokens of the samples, and the end: int64
    [documents + 1]. `position_ids` [B, T] on the host, so that reading them waits for nothing.
    Positions count from 0 in each document, and every sample begins a document."""
    assert position_ids.device.type == "cpu"
    starts = (position_ids == 0).flatten()
    starts[:: position_ids.shape[1]] = True
    return torch.cat([starts.nonzero().flatten(), torch.tensor([starts.numel()])])


def lengths_of_documents(position_ids: torch.Tensor) -> dict[str, Any]:
    """Return arguments for a model with flash attention; `position_ids` as in `edges_of_documents`.
    ``cu_seq_lens_*`` are int32 [documents + 1] on the host, ``max_length_*`` in tokens."""
    edges = edges_of_documents(position_ids).int()
    longest = int(edges.diff().max())
    return {
        "cu_seq_lens_q": edges,
        "cu_seq_lens_k": edges,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def document_numbers(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the number of every token's document in the sample, from 0: int64 like `position_ids`
    [B, T]. Follows transformers' `find_packed_sequence_indices`, without its check for several
    documents."""
    before = position_ids[:, :1] - 1
    return (torch.diff(position_ids, prepend=before, dim=-1) != 1).cumsum(-1)


@dataclass(frozen=True)
class PositionNumbering:
    """Position numbers that a model gives to tokens of a sample without `position_ids`. first:
    number of the first token. uncounted: a token id that does not advance the numbers, with the
    number below `first` (RoBERTa's padding); None: every token counts."""

    first: int = 0
    uncounted: int | None = None

    def numbers(self, input_ids: torch.Tensor | None, positions: torch.Tensor) -> torch.Tensor:
        """Return the model's numbers of `positions` [B, T], which count from 0 in each document of
        full samples. `input_ids` [B, T]; None for a model that is given no tokens."""
        if self.uncounted is None or input_ids is None:
            return positions + self.first
        is_counted = (input_ids != self.uncounted).long()
        num_counted = is_counted.cumsum(1)
        starts = torch.arange(positions.shape[1], device=positions.device) - positions
        num_before = (num_counted - is_counted).gather(1, starts.clamp(min=0))
        return (num_counted - num_before) * is_counted + self.first - 1


PLAIN_NUMBERING = PositionNumbering()


@contextmanager
def document_boundaries(*, packed: bool) -> Iterator[None]:
    """Inside, models read from `packed` whether documents share samples. Otherwise transformers
    reads the positions in every forward pass, and a GPU's host waits."""
    find_documents: Callable[[torch.Tensor], torch.Tensor | None]
    find_documents = document_numbers if packed else lambda _positions: None
    with packed_sequences_found_by(find_documents):
        yield


@contextmanager
def documents_in_masks(position_ids: torch.Tensor) -> Iterator[None]:
    """Inside, transformers' masks of full samples separate the documents of `position_ids` [B, T],
    also in models that make masks without positions."""
    numbers = document_numbers(position_ids)
    numbers_by_device: dict[Any, torch.Tensor] = {}

    def with_documents(build: Callable[..., Any], **options: Any) -> Any:
        length = numbers.shape[1]
        if (options["q_length"], options["kv_length"]) == (length, length):
            device = options.get("device", numbers.device)
            if device not in numbers_by_device:
                numbers_by_device[device] = numbers.to(device, non_blocking=True)
            document_function = packed_sequence_mask_function(numbers_by_device[device])
            mask_function = options.get("mask_function", causal_mask_function)
            options["mask_function"] = and_masks(document_function, mask_function)
            options["allow_is_causal_skip"] = options["allow_is_bidirectional_skip"] = False
        return build(**options)

    before = {name: ALL_MASK_ATTENTION_FUNCTIONS[name] for name in ("sdpa", "eager")}
    for name, build in before.items():
        ALL_MASK_ATTENTION_FUNCTIONS[name] = partial(with_documents, build)
    try:
        yield
    finally:
        for name, build in before.items():
            ALL_MASK_ATTENTION_FUNCTIONS[name] = build


@contextmanager
def document_attention(model: PreTrainedModel) -> Iterator[None]:
    """Inside, `model` attends as flash attention does with cumulative lengths, on any device. Slow,
    with gradients: for tests of a model where flash attention cannot run. A layer that ignores the
    lengths sees all earlier tokens."""
    with attention_by(model, _NAME, _attend):
        yield


@contextmanager
def attention_by(model: PreTrainedModel, name: str, attend: Callable[..., Any]) -> Iterator[None]:
    """Inside, `model` attends by `attend`, a function of transformers' attention interface, and
    makes no masks. `name`: under which `attend` is registered."""
    before = attention_name(model)
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, lambda *_, **__: None)
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: `query` [B, H, T, D], the result [B, T, H, D]. Causal in
    each document; `attention_mask` is not read."""
    samples, heads, tokens, width = query.shape
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    edges = kwargs.get("cu_seq_lens_q")
    if edges is None:
        edges = torch.arange(samples + 1) * tokens
    sizes = edges.diff().tolist()
    scaling, window, softcap = (
        kwargs.get(name) for name in ("scaling", "sliding_window", "softcap")
    )
    scale = width**-0.5 if scaling is None else scaling
    # [H, tokens of the samples, D], split into documents
    rows = [x.transpose(0, 1).flatten(1, 2).split(sizes, 1) for x in (query, key, value)]
    attended = []
    for queries, keys, values in zip(*rows, strict=True):
        scores = queries @ keys.transpose(1, 2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(queries.shape[1])[:, None] - torch.arange(queries.shape[1])
        hidden = distance < 0
        if window is not None:
            hidden |= distance >= window
        attended.append(F.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ values)
    return torch.cat(attended, 1).unflatten(1, (samples, tokens)).permute(1, 2, 0, 3), None
