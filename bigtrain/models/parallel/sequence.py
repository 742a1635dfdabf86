"""Sequence parallelism: ranks divide a sample's tokens. In attention they divide the heads, by two
all-to-all exchanges around it (Ulysses, arXiv 2309.14509), or pass keys and values around a ring
(`bigtrain.models.parallel.ring_attention`), or both: Ulysses in groups of neighbors, each of which
has one rank in the ring.

The module uses transformers' extension points `AttentionInterface` and `AttentionMaskInterface`, so
that any registered attention works unchanged, with any mask. DeepSpeed 0.19.8's
`UlyssesSPAttentionHF` drops masks: with sdpa, windows and document boundaries are silently ignored.

Shapes: B = samples, T = tokens of a sample, t = T / size tokens of a rank, H = heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Any, cast

import torch
from torch.nn import Module
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    packed_sequence_mask_function,
    remap_positions_for_packed_sequence,
)

from bigtrain.errors import ModelError, one_line
from bigtrain.models import experts
from bigtrain.models.layers.attention_kernels import AttentionStates, ScoreScaling
from bigtrain.models.layers.document_attention import (
    IMPLEMENTATIONS,
    RefusedMask,
    attention_of,
    require_causal_window,
)
from bigtrain.models.layers.document_masks import PLAIN_NUMBERING, document_numbers
from bigtrain.models.layers.position_embeddings import (
    embed_positions,
    numbering_of,
    replace_numbers,
)
from bigtrain.models.layers.recurrence.functions import (
    layers_with_functions,
    replace_functions,
    run_by_document,
)
from bigtrain.models.layers.recurrence.pieces import current_documents, current_positions
from bigtrain.models.layers.rotary import choose_by_document, document_lengths
from bigtrain.models.parallel.ring_attention import ring_attention
from bigtrain.models.parallel.ring_plan import RingPlan, tokens_of
from bigtrain.models.parallel.sequence_exchange import SequenceExchange, all_to_all, all_tokens
from bigtrain.models.transformers_patches import attention_name

IMPLEMENTATION = "bigtrain_ulysses_{}"
"""Name in transformers' registries, with a number of the model."""

_numbers_in_use: set[int] = set()


class SequenceParallel:
    """Division of the samples of `model` among ranks; `close` restores the model.

    The ranks of `exchange` share samples: they get equal samples, each rank computes a part, and
    every forward and backward pass is collective. Several models may be open at a time, for
    instance a student and a teacher. Raises ModelError if the architecture does not take its
    attention from transformers' registry.
    """

    def __init__(self, model: PreTrainedModel, exchange: SequenceExchange) -> None:
        self.exchange = exchange
        self.size = exchange.everyone.size
        self._model = model
        self._base = attention_name(model)
        # Of the full samples of the last `inputs`: document numbers and positions of tokens; for
        # rings, the edges of the documents of each sample, and plans by ring rank and window.
        self._documents: torch.Tensor | None = None
        self._positions: torch.Tensor | None = None
        self._edges: list[list[int]] = []
        self._plans: dict[tuple[int, int | None], RingPlan] = {}
        self._exchanging = True
        # Of this rank's part. The check runs ranks as threads, each with separate values.
        self._own_positions = ContextVar[torch.Tensor | None]("own_positions", default=None)
        self._own_numbers = ContextVar[torch.Tensor | None]("own_numbers", default=None)
        # The registries are global to the process: a student and its teacher each need a name.
        number = next(number for number in count() if number not in _numbers_in_use)
        self._name = IMPLEMENTATION.format(number)
        # Exchanges and plans of rings are outside of the graphs of a compiled layer.
        attention = torch.compiler.disable(self._attention, reason="ranks exchange tokens or heads")
        AttentionInterface.register(self._name, attention)
        AttentionMaskInterface.register(self._name, self._mask)
        try:
            model.set_attn_implementation(self._name)
        except (ValueError, KeyError) as error:
            raise _refusal(model, one_line(error, None)) from error
        if attention_name(model) != self._name:
            raise _refusal(model, "its attention cannot be replaced")
        self._number = number
        _numbers_in_use.add(number)
        decoder: Module = model.get_decoder()
        self._hook = decoder.register_forward_hook(self._all_router_logits)
        self._undo_rotary = choose_by_document(model, self._document_lengths)
        self._undo_positions = embed_positions(model, self._part_of_positions)
        self._numbering = numbering_of(model)
        self._undo_numbers: Callable[[], None] | None = None
        if self._numbering != PLAIN_NUMBERING:
            self._undo_numbers = replace_numbers(model, self._part_of_numbers)
        self._undo_functions: Callable[[], None] | None = None
        if any(layers_with_functions(model)):
            self._undo_functions = self._pass_states(model)

    def _pass_states(self, model: PreTrainedModel) -> Callable[[], None]:
        """Let recurrent layers continue the states of other ranks; returns an undo function."""
        from bigtrain.models.parallel.state_passing import StatePassing

        ranks = range(self.size)
        passing = StatePassing(
            self.exchange.everyone,
            lambda length: [tokens_of(length, *self._sizes, rank) for rank in ranks],
        )
        return replace_functions(
            model,
            lambda call: passing.run(call) if self._exchanging else run_by_document(call),
            lambda: not self._exchanging and current_documents() is None,
        )

    def close(self) -> None:
        """Restore the model's attention, rotary embeddings and recurrent layers."""
        if self._undo_functions is not None:
            self._undo_functions()
        if self._undo_numbers is not None:
            self._undo_numbers()
        self._undo_positions()
        self._undo_rotary()
        self._hook.remove()
        self._model.set_attn_implementation(self._base)
        _numbers_in_use.discard(self._number)

    def part(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens of `tokens` [B, T, ...]: [B, t, ...]."""
        parts = [tokens[:, start:stop] for start, stop in self.places(tokens.shape[1])]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def whole(self, values: torch.Tensor) -> torch.Tensor:
        """See `SampleParts`."""
        length = values.shape[1] * self.size
        order = [tokens_of(length, *self._sizes, rank) for rank in range(self.size)]
        return all_tokens(self.exchange.everyone, values, order)

    def padded(self, length: int) -> int:
        """See `SampleParts`."""
        ulysses_size, ring_size = self._sizes
        unit = ulysses_size * ring_size * (2 if ring_size > 1 else 1)
        return -(-length // unit) * unit

    @property
    def counts(self) -> bool:
        """See `SampleParts`."""
        return self.exchange.everyone.rank == 0

    @property
    def _sizes(self) -> tuple[int, int]:
        return self.exchange.ulysses.size, self.exchange.ring.size

    def places(self, length: int) -> list[tuple[int, int]]:
        """Return the ranges of this rank's tokens in a sample of `length`, in order."""
        return tokens_of(length, *self._sizes, self.exchange.everyone.rank)

    def inputs(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        on_host: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return the model's inputs for this rank's part of samples, `input_ids` int64 [B, T].
        `position_ids` int64 [B, T] isolate documents; None: each sample is one document. `on_host`:
        these positions on the host, for the plans of a ring, if `position_ids` are on a device. The
        next forward pass has the masks of these samples."""
        # Each attribute is assigned once: threads that share a model bring equal samples, and
        # another thread may read the attributes to build masks in the meantime
        # (`bigtrain.models.equivalence.sequence_parallel`).
        self._documents = None if position_ids is None else document_numbers(position_ids)
        self._positions = position_ids
        if self.exchange.ring.size > 1:
            positions = position_ids if on_host is None else on_host
            num_samples, length = input_ids.shape
            if positions is None:
                self._edges = [[0, length]] * num_samples
            else:
                is_start = positions.cpu() == 0
                is_start[:, 0] = True
                self._edges = [[*row.nonzero().flatten().tolist(), length] for row in is_start]
            self._plans = {}
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
            position_ids = position_ids.expand_as(input_ids)
        ids, positions = self.part(input_ids), self.part(position_ids)
        self._own_positions.set(positions)
        # The model's numbers depend on all earlier tokens of a sample, also on other ranks.
        if self._numbering != PLAIN_NUMBERING:
            numbers = self._numbering.numbers(input_ids, position_ids)
            self._own_numbers.set(self.part(numbers))
        return {
            "input_ids": ids,
            "position_ids": positions,
            # Without a mask transformers would look for documents in the positions of a part.
            "attention_mask": torch.ones_like(ids),
        }

    @contextmanager
    def whole_samples(self) -> Iterator[None]:
        """Inside, every rank computes full samples independently."""
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

    def _part_of_positions(self) -> torch.Tensor | None:
        """Return the positions of this rank's tokens [B, t], for models that count positions
        themselves."""
        if not self._exchanging:
            return current_positions()
        return self._own_positions.get()

    def _part_of_numbers(
        self, input_ids: torch.Tensor | None, position_ids: torch.Tensor
    ) -> torch.Tensor:
        """Return the model's numbers of this rank's tokens [B, t]."""
        numbers = self._own_numbers.get()
        if numbers is None or not self._exchanging:
            return self._numbering.numbers(input_ids, position_ids)
        return numbers

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

        # Every rank of Ulysses gets equally many heads, with the sinks of its heads; key heads are
        # repeated if there are too few.
        ulysses = self.exchange.ulysses
        heads, key_heads = query.shape[1], key.shape[1]
        if heads % ulysses.size:
            raise ModelError(
                f"parallel.sequence = {ulysses.size}: {type(module).__name__} has {heads} "
                "attention heads, which it does not divide"
            )
        copies = math.lcm(key_heads, ulysses.size) // key_heads
        sinks = kwargs.get("s_aux")
        if sinks is not None and ulysses.size > 1:
            sinks = kwargs["s_aux"] = sinks.unflatten(0, (ulysses.size, -1))[ulysses.rank]
        if copies > 1:
            key = key.repeat_interleave(copies, dim=1)
            value = value.repeat_interleave(copies, dim=1)
        states = AttentionStates(*(self._exchange_heads(x) for x in (query, key, value)))

        if isinstance(attention_mask, RefusedMask):
            raise ModelError(attention_mask.refusal)
        if isinstance(attention_mask, RingPlan):
            # Queries attend to the keys of every rank of the ring.
            if kwargs.get("dropout"):
                raise ModelError("a ring has no dropout of attention weights")
            if kwargs.get("is_causal") is False or kwargs.get("position_bias") is not None:
                raise ModelError(f"{type(module).__name__} attends to more than the tokens before")
            scale = kwargs.get("scaling")
            if scale is None:
                scale = states.query.shape[-1] ** -0.5
            # As sdpa, a ring in place of sdpa ignores caps and sinks.
            is_sdpa = self._base in ("sdpa", IMPLEMENTATIONS["sdpa"])
            output = ring_attention(
                states,
                None if is_sdpa else kwargs.get("s_aux"),
                attention_mask,
                self.exchange.ring,
                ScoreScaling(scale, None if is_sdpa else kwargs.get("softcap")),
            )
            return self._exchange_heads(output.transpose(1, 2)), None
        if copies > 1 or sinks is not None:
            module = cast(Module, _RankHeads(module, heads // (key_heads * copies), sinks))
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = self._positions
        output, _ = base(module, *states, attention_mask, **kwargs)
        return self._exchange_heads(output), None

    def _mask(
        self,
        *,
        q_length: int,
        kv_length: int,
        mask_function: Callable[..., Any] | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """transformers' mask interface: always the mask of full samples."""
        # A ring gets the plan for the samples of the last `inputs` instead of a mask.
        if self._exchanging and self.exchange.ring.size > 1:
            if RefusedMask.is_asked_for(kwargs):
                return RefusedMask("a ring has no attention to all tokens")
            length = q_length * self.size
            window = require_causal_window(
                "{}",
                q_length=length,
                kv_length=kv_length * self.size,
                mask_function=mask_function,
                **kwargs,
            )
            key = (self.exchange.ring.rank, window)
            plans = self._plans
            if key not in plans:
                plans[key] = RingPlan(self.exchange.ring.size, length, self._edges, window)
            return plans[key]

        build: Callable[..., Any] = ALL_MASK_ATTENTION_FUNCTIONS[self._base]
        if self._exchanging:
            q_length *= self.size
            kv_length *= self.size
            attention_mask = None
            # transformers finds documents in the positions, of which the model has only a part.
            if self._documents is not None and self._base not in IMPLEMENTATIONS.values():
                assert mask_function is not None
                mask_function = and_masks(
                    packed_sequence_mask_function(self._documents),
                    remap_positions_for_packed_sequence(mask_function, self._positions),
                )
                kwargs["allow_is_causal_skip"] = False
        return build(
            q_length=q_length,
            kv_length=kv_length,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **kwargs,
        )

    def _all_router_logits(self, _module: Module, _args: Any, outputs: Any) -> None:
        """Give every rank the router logits of all ranks, as if further layers had computed them:
        the auxiliary loss is a mean over layers and tokens, so every rank has the loss of full
        samples."""
        router_logits = getattr(outputs, experts.KEY, None)
        if self._exchanging and router_logits:
            layers = torch.stack(router_logits)
            copies = layers.expand(self.size, *layers.shape)  # one for each rank
            layers_by_rank = all_to_all(self.exchange.everyone, copies)
            outputs[experts.KEY] = tuple(layers_by_rank.flatten(0, 1))

    def _exchange_heads(self, states: torch.Tensor) -> torch.Tensor:
        """Split dimension 1 of `states` [B, n, m, D] among the ranks of Ulysses, and join dimension
        2: [B, n / size, size * m, D]. Before attention n are heads and m tokens: this rank gets its
        heads for all tokens. After attention n are tokens and m heads: it gets all heads for its
        tokens."""
        ulysses = self.exchange.ulysses
        if ulysses.size == 1:
            return states
        blocks = states.unflatten(1, (ulysses.size, -1)).movedim(1, 0)
        return all_to_all(ulysses, blocks).permute(1, 2, 0, 3, 4).flatten(2, 3)


class _RankHeads:
    """Attention module as seen by an attention function that computes the heads of a rank: with the
    groups of repeated key heads, and the sinks of the rank's heads (gpt-oss)."""

    def __init__(
        self, module: Module, num_key_value_groups: int, sinks: torch.Tensor | None
    ) -> None:
        self.attention_module = module
        self.num_key_value_groups = num_key_value_groups
        if sinks is not None:
            self.sinks = sinks

    def __getattr__(self, name: str) -> Any:
        return getattr(self.attention_module, name)


def _refusal(model: PreTrainedModel, reason: str) -> ModelError:
    return ModelError(
        f"parallel.sequence is not supported for model_type {model.config.model_type}: {reason} -> "
        "set parallel.sequence=1, or take another architecture"
    )
