"""Attention for each document of a sample separately: equal to attention with a block-diagonal
causal mask, without the mask's sequence squared elements.

transformers' extension points make this possible: `AttentionMaskInterface` may return any object as
mask, here the documents' lengths, and layers pass the object on to `AttentionInterface`, also when
they are recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bigtrain.errors import ModelError
from bigtrain.models.layers.document_masks import (
    PLAIN_NUMBERING,
    PositionNumbering,
    document_boundaries,
    documents_in_masks,
    edges_of_documents,
    lengths_of_documents,
)
from bigtrain.models.transformers_patches import attention_name

IMPLEMENTATIONS = {name: f"bigtrain_documents_{name}" for name in ("sdpa", "eager")}
"""Names of attention by document, by the name of the attention that computes a document."""

_CURRENT_SIZES: ContextVar[tuple[int, ...] | None] = ContextVar("sizes", default=None)


@dataclass(frozen=True)
class DocumentBoundaries:
    """Document boundaries that layers get instead of a mask. sizes: number of tokens of each
    document of a micro-batch, sample after sample. window: number of tokens that a token sees,
    itself included; None: all earlier tokens of the document."""

    sizes: tuple[int, ...]
    window: int | None


@dataclass(frozen=True)
class RefusedMask:
    """Stands for a mask that no attention may use: decoders of BART's family make such a mask for
    attention to an encoder, which a causal LM does not have. refusal: text of the ModelError that
    attention with this mask raises."""

    refusal: str

    @staticmethod
    def is_asked_for(options: Mapping[str, Any]) -> bool:
        """Return whether arguments of transformers' mask interface ask for a mask by which a token
        sees all tokens: only `create_bidirectional_mask` passes this argument."""
        return "allow_is_bidirectional_skip" in options


@contextmanager
def per_document_attention(position_ids: torch.Tensor) -> Iterator[None]:
    """Inside, models with this attention get the documents of `position_ids` instead of masks.
    position_ids: [B, T] on the host, of full samples."""
    token = _CURRENT_SIZES.set(tuple(edges_of_documents(position_ids).diff().tolist()))
    try:
        yield
    finally:
        _CURRENT_SIZES.reset(token)


def attend_by_document(model: PreTrainedModel) -> Callable[[], None]:
    """Make `model`, whose attention is sdpa or eager, attend by document; returns an undo function.

    Outside of `per_document_attention`, the model attends to full samples. A forward pass inside
    raises ModelError if the model asks for a mask that is not causal (with or without a sliding
    window).
    """
    original = attention_name(model)
    name = IMPLEMENTATIONS[original]
    # A compiled layer is divided here: a graph would be compiled again for other documents.
    attend = torch.compiler.disable(
        partial(_attend, implementation=original), reason="documents have other lengths"
    )
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, partial(_make_mask, original))
    model.set_attn_implementation(name)
    return lambda: model.set_attn_implementation(original)


def _make_mask(name: str, **arguments: Any) -> Any:
    """Follow transformers' mask interface: return the documents' boundaries, or outside of
    `per_document_attention` the mask of attention `name`."""
    sizes = _CURRENT_SIZES.get()
    if sizes is None:
        build: Callable[..., Any] = ALL_MASK_ATTENTION_FUNCTIONS[name]
        return build(**arguments)
    # Some models pass a padding mask of ones that the caller did not give; `all` waits for the
    # device.
    padding_mask = arguments.get("attention_mask")
    if padding_mask is not None and bool(padding_mask.all()):
        arguments["attention_mask"] = None
    refusal = (
        "documents of a sample cannot be kept apart: {} -> set data.document_boundaries=ignore"
    )
    if RefusedMask.is_asked_for(arguments):
        return RefusedMask(refusal.format("the model attends to all tokens"))
    return DocumentBoundaries(sizes, require_causal_window(refusal, **arguments))


def require_causal_window(
    refusal: str,
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., torch.Tensor] | None,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    **options: Any,
) -> int | None:
    """Return the sliding window, if any, of the mask that a model asks for with the arguments of
    transformers' mask interface. Raises ModelError if the mask is not causal: `refusal` with the
    reason."""
    is_unpadded = attention_mask is None and q_length == kv_length
    # `mask_function` runs on the CPU. Functions that hold tensors of the device are excluded: these
    # models say that the mask is no plain causal mask, or attend in chunks.
    is_plain = options.get("allow_is_causal_skip", True)
    has_chunks = getattr(options.get("config"), "attention_chunk_size", None) is not None
    is_band = False
    if is_unpadded and is_plain and not has_chunks and mask_function is not None:
        # A token must see itself and window - 1 tokens before. The test covers the rows at which
        # the window starts to move, in the middle, and at the end.
        width = q_length if local_size is None else local_size
        rows = {0, 1, width - 1, width, width + 1, 2 * width, q_length // 2, q_length - 1}
        query = torch.tensor(sorted(row for row in rows if 0 <= row < q_length))[:, None]
        key = torch.arange(q_length)
        zero = torch.zeros((), dtype=torch.int64)
        visible = mask_function(zero, zero, query, key).expand(len(query), q_length)
        is_band = torch.equal(visible, _causal_band(query, key, width))
    if not is_band:
        raise ModelError(refusal.format("the model asks for other masks than causal ones"))
    return local_size


def _causal_band(query: torch.Tensor, key: torch.Tensor, window: int) -> torch.Tensor:
    """Return whether a query sees a key, [queries, keys], for positions `query` [queries, 1] and
    `key` [keys]: itself and the ``window - 1`` positions before."""
    return (key <= query) & (key > query - window)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    implementation: str,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Follow transformers' attention interface: `query` is [B, H, T, D], the result [B, T, H,
    D]."""
    attend_to_document = attention_of(implementation, module)
    if isinstance(attention_mask, RefusedMask):
        raise ModelError(attention_mask.refusal)
    if not isinstance(attention_mask, DocumentBoundaries):
        return attend_to_document(module, query, key, value, attention_mask, **kwargs)[0], None
    if kwargs.get("is_causal") is False or kwargs.get("position_bias") is not None:
        raise ModelError(f"{type(module).__name__} attends to more than the tokens before")
    num_samples, _, num_tokens, _ = query.shape
    # All documents are split at once, so that the backward pass writes each gradient once.
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]  # [B * T, H, D]
    sizes = list(attention_mask.sizes)
    window = attention_mask.window or num_tokens
    outputs = []
    for document in zip(*(x.split(sizes) for x in rows), strict=True):
        states = [x.transpose(0, 1)[None] for x in document]  # [1, H, L, D]
        for q, k, v, mask in _window_blocks(states, window, implementation):
            block_output, *_ = attend_to_document(module, q, k, v, mask, **kwargs)
            outputs.append(block_output[0])
    return torch.cat(outputs).unflatten(0, (num_samples, num_tokens)), None


def _window_blocks(
    document: Sequence[torch.Tensor], window: int, name: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Yield queries, keys, values [1, H, L, D] and mask for attention `name` of each block of
    `document` (its queries, keys and values). The queries of a block are at most `window`."""
    query, key, value = document
    length = query.shape[2]
    if length <= window and name == "sdpa":
        yield query, key, value, None  # sdpa without a mask is causal
        return
    positions = torch.arange(length, device=query.device)
    for start in range(0, length, window):
        rows = slice(start, min(start + window, length))
        columns = slice(max(0, start - window + 1), rows.stop)
        mask = _causal_band(positions[rows, None], positions[columns], window)
        if name == "eager":  # adds the mask to the scores
            zeros = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device)
            mask = zeros.masked_fill(~mask, torch.finfo(query.dtype).min)
        yield query[:, :, rows], key[:, :, columns], value[:, :, columns], mask[None, None]


def attention_of(name: str, module: Any) -> Callable[..., Any]:
    """Return the function of attention `name` for `module`, which may wrap the attention module
    (`attention_module`). Eager attention is a function in the architecture's file."""
    if name != "eager":
        return ALL_ATTENTION_FUNCTIONS[name]  # type: ignore[no-any-return]
    attention_module = getattr(module, "attention_module", module)
    source = __import__(type(attention_module).__module__, fromlist=["eager_attention_forward"])
    return source.eager_attention_forward  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Isolation:
    """How a model isolates the documents of a sample.

    method: "none": attention is not isolated. "masks": transformers computes masks from positions.
    "documents": attention runs for each document separately, without a mask. "lengths": flash
    attention gets the documents' lengths. restarts: whether recurrent layers and convolutions start
    afresh at each document, and compute long documents in segments
    (`bigtrain.models.layers.recurrence`). positions: whether positions that the model counts itself
    begin at each document (`bigtrain.models.layers.position_embeddings`). modules: classes of
    modules that mix tokens in another way, and are called for each document. overlays: whether the
    masks of a model that computes masks without positions get the documents. numbering: of the
    positions that the model is given, also for parts of samples that are not isolated.
    """

    method: Literal["none", "masks", "documents", "lengths"]
    restarts: bool = False
    positions: bool = False
    modules: tuple[str, ...] = ()
    overlays: bool = False
    numbering: PositionNumbering = PLAIN_NUMBERING

    @property
    def reason(self) -> str:
        """A human-readable line; empty without isolation."""
        descriptions = {
            "masks": "by masks that the model makes from positions",
            "documents": "attention runs for each separately, without masks",
            "lengths": "by the lengths that flash attention takes",
        }
        if self.method not in descriptions:
            return "scans of recurrent layers run in segments" if self.restarts else ""
        parts = ["by masks" if self.overlays else descriptions[self.method]]
        if self.restarts:
            parts.append("states and convolutions of recurrent layers start afresh at each")
        if self.positions:
            parts.append("positions that the model counts itself begin at 0 in each")
        if self.numbering.first:
            parts.append(f"positions begin at {self.numbering.first} in each")
        if self.modules:
            parts.append(f"{', '.join(self.modules)} run for each separately")
        return f"documents of a sample are kept apart: {'; '.join(parts)}"

    def install(self, model: PreTrainedModel) -> Callable[[], None]:
        """Make `model` isolate documents; returns an undo function."""
        with ExitStack() as undo:
            if self.method != "none":
                from bigtrain.models.layers.rotary import choose_by_document

                undo.callback(choose_by_document(model))
            if self.method == "documents":
                undo.callback(attend_by_document(model))
            if self.restarts or self.modules:
                from bigtrain.models.layers.recurrence.restarts import restart_at_documents

                undo.callback(restart_at_documents(model, self.modules))
            if self.positions:
                from bigtrain.models.layers.position_embeddings import embed_positions
                from bigtrain.models.layers.recurrence.pieces import current_positions

                undo.callback(embed_positions(model, current_positions))
            if self.numbering != PLAIN_NUMBERING:
                from bigtrain.models.layers.position_embeddings import number_positions

                undo.callback(number_positions(model, self.numbering))
            return undo.pop_all().close

    @contextmanager
    def document_mask(self, position_ids: torch.Tensor | None) -> Iterator[None]:
        """Inside, a forward pass isolates the documents of `position_ids` [B, T], on the host and
        of full samples; None if each sample is one document."""
        has_documents = position_ids is not None
        with ExitStack() as stack:
            needs_masks = has_documents and self.method != "documents"
            stack.enter_context(document_boundaries(packed=needs_masks))
            if position_ids is not None and self.overlays:
                stack.enter_context(documents_in_masks(position_ids))
            if position_ids is not None and self.method == "documents":
                stack.enter_context(per_document_attention(position_ids))
            if self.restarts or self.positions or self.modules:
                from bigtrain.models.layers.recurrence.pieces import (
                    SampleDocuments,
                    documents_in_samples,
                )

                documents = None if position_ids is None else SampleDocuments(position_ids)
                stack.enter_context(documents_in_samples(documents))
            yield

    def arguments(self, position_ids: torch.Tensor | None) -> dict[str, Any]:
        """Return the arguments that flash attention needs for documents, by name; tensors are on
        the host. Empty for other methods."""
        if position_ids is None or self.method != "lengths":
            return {}
        return lengths_of_documents(position_ids)


NOT_ISOLATED = Isolation("none")

MASKED = Isolation("masks")
