"""Sequence parallelism (Ulysses, arXiv 2309.14509): ranks divide a sample's tokens, and in
attention the heads, by two all-to-all exchanges around it.

It uses transformers' extension points `AttentionInterface` and `AttentionMaskInterface`, so that
any attention behind them and any of its masks work unchanged. DeepSpeed 0.19.8's
`UlyssesSPAttentionHF` drops masks: with sdpa, windows and document boundaries are silently ignored.

Shapes: B = samples, T = tokens of a sample, t = T / size tokens of one rank, H = heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch.nn import Module
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    packed_sequence_compatibility_function,
)

from bigtrain.errors import ModelError, one_line
from bigtrain.models import experts
from bigtrain.models.layers.document_attention import IMPLEMENTATIONS, attention_of
from bigtrain.models.layers.document_masks import document_numbers
from bigtrain.models.layers.rotary import choose_by_document, document_lengths
from bigtrain.models.transformers_patches import attention_name

IMPLEMENTATION = "bigtrain_ulysses"


class Exchange(Protocol):
    """The ranks that share samples, and how they exchange."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def all_to_all(self, blocks: torch.Tensor) -> torch.Tensor:
        """Send ``blocks[i]`` to rank i; block i of the result came from there. Collective."""


class GroupExchange:
    """Exchange over a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def all_to_all(self, blocks: torch.Tensor) -> torch.Tensor:
        """See `Exchange`."""
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks, group=self.group)
        return received


class SequenceParallel:
    """Makes `model` compute on parts of samples; `close` restores its own attention.

    The ranks of `exchange` share samples: they get the same ones, each computes its own part, and
    every forward and backward pass is collective over them. One such model at a time, since
    transformers' registries are global to the process. Raises ModelError if the architecture does
    not take its attention from transformers' registry.
    """

    def __init__(self, model: PreTrainedModel, exchange: Exchange) -> None:
        self.exchange = exchange
        self.size = exchange.size
        self._model = model
        self._base = attention_name(model)
        self._documents: torch.Tensor | None = None
        self._positions: torch.Tensor | None = None
        self._exchanging = True
        AttentionInterface.register(IMPLEMENTATION, self._attention)
        AttentionMaskInterface.register(IMPLEMENTATION, self._mask)
        try:
            model.set_attn_implementation(IMPLEMENTATION)
        except (ValueError, KeyError) as error:
            raise _refusal(model, one_line(error, None)) from error
        if attention_name(model) != IMPLEMENTATION:
            raise _refusal(model, "its attention cannot be replaced")
        decoder: Module = model.get_decoder()
        self._hook = decoder.register_forward_hook(self._all_router_logits)
        self._undo_rotary = choose_by_document(model, self._document_lengths)

    def close(self) -> None:
        """Restore the model's own attention and rotary embeddings."""
        self._undo_rotary()
        self._hook.remove()
        self._model.set_attn_implementation(self._base)

    def part(self, tokens: torch.Tensor) -> torch.Tensor:
        """This rank's tokens of `tokens` [B, T, ...]: [B, t, ...]."""
        assert tokens.shape[1] % self.size == 0
        length = tokens.shape[1] // self.size
        return tokens.narrow(1, self.exchange.rank * length, length)

    def inputs(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """Return the model's inputs for this rank's part of samples, `input_ids` int64 [B, T].
        `position_ids` int64 [B, T] isolate documents; None: each sample is one document. The masks
        of the next forward pass are those of these samples."""
        # Each assigned once: threads that share a model bring the same samples, and one may make
        # its masks while another is here (`bigtrain.models.equivalence.sequence_parallel`).
        self._documents = None if position_ids is None else document_numbers(position_ids)
        self._positions = position_ids
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
            position_ids = position_ids.expand_as(input_ids)
        ids = self.part(input_ids)
        return {
            "input_ids": ids,
            "position_ids": self.part(position_ids),
            # Without it transformers looks for documents in the positions of a part.
            "attention_mask": torch.ones_like(ids),
        }

    @contextmanager
    def whole_samples(self) -> Iterator[None]:
        """Inside, every rank computes full samples on its own."""
        self._exchanging = False
        try:
            yield
        finally:
            self._exchanging = True

    def _document_lengths(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Return lengths in full samples, of which `position_ids` [B, t] are a part."""
        if not self._exchanging:
            return document_lengths(position_ids)
        if self._positions is None:
            return torch.full_like(position_ids, position_ids.shape[1] * self.size)
        return self.part(document_lengths(self._positions))

    def _attention(
        self,
        module: Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """transformers' attention interface: `query` [B, H, t, D], the result [B, t, H, D]."""
        base = attention_of(self._base, module)
        if not self._exchanging:
            output, _ = base(module, query, key, value, attention_mask, **kwargs)
            return output, None
        heads, key_heads = query.shape[1], key.shape[1]
        if heads % self.size:
            raise ModelError(
                f"parallel.sequence = {self.size}: {type(module).__name__} has {heads} attention "
                "heads, which it does not divide"
            )
        copies = math.lcm(key_heads, self.size) // key_heads
        if copies > 1:
            key = key.repeat_interleave(copies, dim=1)
            value = value.repeat_interleave(copies, dim=1)
            module = cast(Module, _Grouped(module, heads // (key_heads * copies)))
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = self._positions
        output, _ = base(
            module,
            self._to_heads(query),
            self._to_heads(key),
            self._to_heads(value),
            attention_mask,
            **kwargs,
        )
        return self._to_tokens(output), None

    def _mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int = 0,
        kv_offset: int = 0,
        mask_function: Callable[..., Any] | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """transformers' mask interface: always the mask of full samples."""
        build: Callable[..., Any] = ALL_MASK_ATTENTION_FUNCTIONS[self._base]
        if self._exchanging:
            q_length *= self.size
            kv_length *= self.size
            attention_mask = None
            if self._documents is not None and self._base not in IMPLEMENTATIONS.values():
                mask_function = packed_sequence_compatibility_function(
                    mask_function, self._positions, self._documents
                )
                kwargs["allow_is_causal_skip"] = False
        return build(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **kwargs,
        )

    def _all_router_logits(self, _module: Module, _args: Any, outputs: Any) -> None:
        """Append every rank's router logits as those of further layers: the auxiliary loss averages
        over layers and tokens, so it is that of full samples on every rank."""
        own = getattr(outputs, experts.KEY, None)
        if self._exchanging and own:
            layers = torch.stack(own)
            everyone = _all_to_all(self.exchange, layers.expand(self.size, *layers.shape))
            outputs[experts.KEY] = tuple(everyone.flatten(0, 1))

    def _to_heads(self, states: torch.Tensor) -> torch.Tensor:
        """Exchange all heads of own tokens [B, H, t, D] for own heads of all tokens [B, H / size,
        T, D]."""
        blocks = states.unflatten(1, (self.size, -1)).movedim(1, 0)
        return _all_to_all(self.exchange, blocks).permute(1, 2, 0, 3, 4).flatten(2, 3)

    def _to_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """My heads of all tokens [B, T, H / size, D] to all heads of my tokens [B, t, H, D]."""
        blocks = states.unflatten(1, (self.size, -1)).movedim(1, 0)
        return _all_to_all(self.exchange, blocks).permute(1, 2, 0, 3, 4).flatten(2, 3)


class _AllToAll(torch.autograd.Function):
    """Block i of the first dimension goes to rank i, and comes from it. Its own transpose."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, blocks: torch.Tensor) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.all_to_all(blocks.contiguous())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, _all_to_all(ctx.exchange, gradients[0])


def _all_to_all(exchange: Exchange, blocks: torch.Tensor) -> torch.Tensor:
    received: torch.Tensor = _AllToAll.apply(exchange, blocks)  # type: ignore[no-untyped-call]
    return received


class _Grouped:
    """An attention module whose key heads were copied, as attention functions see it."""

    def __init__(self, module: Module, num_key_value_groups: int) -> None:
        self._module = module
        self.num_key_value_groups = num_key_value_groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _refusal(model: PreTrainedModel, reason: str) -> ModelError:
    return ModelError(
        f"parallel.sequence is not supported for model_type {model.config.model_type}: {reason} -> "
        "set parallel.sequence=1, or take another architecture"
    )
