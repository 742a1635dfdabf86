"""Which experts each token is sent to, seen in a model under training.

A token is known by its step, its sample (a checksum of the sample's tokens) and its place there; so
what ranks see of it is the same wherever it is computed: on one rank, on each of several
tensor-parallel ones, and again where a layer is recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers.models.dbrx.modeling_dbrx import DbrxExperts

from bigtrain.models.torch_patches import is_in_backward
from bigtrain.models.transformers_patches import modules_of_experts


@dataclass(frozen=True)
class Seen:
    """What one rank saw: its samples by step, the place of its first token in each of them, and
    by layer the experts of its tokens in the order it computed them, int64 [tokens, k]."""

    samples: list[list[int]]
    start: int
    rows: dict[str, list[np.ndarray[Any, Any]]] = field(default_factory=dict)


def _kinds(model: nn.Module) -> set[type]:
    """Classes of modules of experts: those of transformers' decorator, and Dbrx's, without it."""
    return {type(module) for module in modules_of_experts(model)} | {DbrxExperts}


Routing = dict[str, Any]
"""``experts``: by layer, of every token in order of step, sample and place, its experts ascending;
``times``: how often each token was seen, the same for all."""


class Choices:
    """Notes what goes into every module of experts of `model` from now on."""

    def __init__(self, model: nn.Module) -> None:
        self._first: dict[str, list[np.ndarray[Any, Any]]] = {}
        self._again: dict[str, list[np.ndarray[Any, Any]]] = {}
        names = {module: name for name, module in model.named_modules()}
        for module, name in names.items():
            if type(module) in _kinds(model):
                self._watch(module, name)

    def _watch(self, module: nn.Module, name: str) -> None:
        def note(_module: nn.Module, args: Any, kwargs: Any) -> None:
            chosen = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
            rows = chosen.reshape(-1, chosen.shape[-1]).sort(-1).values
            # A recomputed layer chooses in the backward pass of the same micro-batches, in order.
            noted = self._again if is_in_backward() else self._first
            noted.setdefault(name, []).append(rows.cpu().numpy())

        module.register_forward_pre_hook(note, with_kwargs=True)

    def of_one(self, samples: list[list[int]]) -> Routing:
        """In one process that computes `samples` (checksums, by step) in this order."""
        return _ordered([Seen(samples, 0, noted) for noted in (self._first, self._again)])

    def of_all_ranks(self, samples: list[list[int]], sequence_rank: int) -> Routing:
        """Of all ranks together; `samples` are those of this one. Collective."""
        own = [Seen(samples, sequence_rank, noted) for noted in (self._first, self._again)]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        return _ordered([seen for rank in everyone for seen in rank])


def checksum(tokens: torch.Tensor) -> int:
    """Of a sample, int64 [T]."""
    return crc32(tokens.numpy())


def _ordered(everyone: Sequence[Seen]) -> Routing:
    """Raises AssertionError where a token was seen with different experts, or some more often."""
    experts, times = {}, set()
    for name in sorted({name for seen in everyone for name in seen.rows}):
        tokens, rows = [], []
        for seen in everyone:
            if name not in seen.rows:
                continue
            chosen = np.concatenate(seen.rows[name])
            steps = [(s, sample) for s, samples in enumerate(seen.samples) for sample in samples]
            length = len(chosen) // len(steps)
            assert length * len(steps) == len(chosen), name
            places = np.tile(np.arange(length) + seen.start * length, len(steps))
            tokens.append(np.c_[np.repeat(np.array(steps, np.int64), length, 0), places])
            rows.append(chosen)
        token, chosen = np.concatenate(tokens), np.concatenate(rows)
        order = np.lexsort(token.T[::-1])
        token, chosen = token[order], chosen[order]
        again = (token[1:] == token[:-1]).all(1)
        assert (chosen[1:] == chosen[:-1])[again].all(), f"{name}: ranks differ, or a recomputation"
        first = np.flatnonzero(np.r_[True, ~again])
        times |= set(np.diff(np.r_[first, len(token)]).tolist())
        experts[name] = chosen[first].tolist()
    assert len(times) <= 1, times
    return {"experts": experts, "times": max(times, default=0)}


def differing(routing: Routing, expected: Routing) -> dict[str, int]:
    """How many tokens go elsewhere, by layer; empty where none does."""
    one, other = routing["experts"], expected["experts"]
    assert one.keys() == other.keys()
    assert {n: len(rows) for n, rows in one.items()} == {n: len(r) for n, r in other.items()}
    counts = {n: sum(a != b for a, b in zip(one[n], other[n], strict=True)) for n in one}
    return {name: count for name, count in counts.items() if count}
