"""The harness of all equivalence trials, also of `bigtrain parity`: runs a proxy model without and
with one change on the same batch, and names the first difference."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from bigtrain.models.equivalence.proxy_model import proxy_tokens
from bigtrain.models.experts import auxiliary_loss
from bigtrain.models.layers.parameters import has_score_head
from bigtrain.models.parallel.ring_attention import Message, Wait
from bigtrain.models.parallel.sharding import Shard

OUTPUT, LOSS, GRADIENT = "output", "loss", "gradient"
"""Kinds of compared tensors, in the order of a step."""


@dataclass(frozen=True)
class LocalTensor:
    """The shard of a tensor that a rank computed, for comparison with the full one."""

    tensor: torch.Tensor
    shard: Shard


Values = Mapping[str, torch.Tensor]
Results = Mapping[str, Mapping[str, torch.Tensor | LocalTensor]]
"""Tensors of a run by kind and name: ``results[GRADIENT]["model.norm.weight"]``."""
Run = Callable[[PreTrainedModel], Results]


@dataclass(frozen=True)
class Tolerance:
    """Largest difference that counts as rounding, a sum of three terms. own: relative to the
    tensor's largest value. common: relative to the largest value of all tensors of its kind.
    absolute: in the tensor's unit."""

    own: float = 0.0
    common: float = 0.0
    absolute: float = 0.0

    def limits(self, expected: Values) -> dict[str, float]:
        """Return the largest allowed difference of each tensor."""
        largest = {name: largest_value(tensor) for name, tensor in expected.items()}
        common = self.absolute + self.common * max(largest.values(), default=0.0)
        return {name: self.own * value + common for name, value in largest.items()}


Tolerances = Mapping[str, Tolerance]


@dataclass(frozen=True)
class Difference:
    """A tensor that differs by more than rounding; distance: its largest difference."""

    kind: str
    name: str
    distance: float
    limit: float

    @property
    def where(self) -> str:
        """The tensor, for example "gradient of model.norm.weight"."""
        return f"gradient of {self.name}" if self.kind == GRADIENT else self.name

    @property
    def size(self) -> str:
        return f"by {self.distance:.2g}, rounding is below {self.limit:.2g}"


@dataclass(frozen=True)
class Trial:
    """One change of a model, and the differences that count as rounding.

    plain, changed: results of a model without and with the change; the former leaves the model
    unchanged. control: results if the change were wrong; those of the first kind of `tolerances`
    have to differ by ten times the tolerance, or the comparison would detect nothing.
    """

    plain: Run
    changed: Run
    tolerances: Tolerances
    control: Run | None = None

    def difference(self, model: PreTrainedModel) -> Difference | None:
        """Run both and return the first difference; None if there is none. Raises ValueError if the
        model or the trial is unsuitable, and whatever the model's code does."""
        expected: Any = self.plain(model)
        _require_finite(expected)
        if self.control is not None:
            kind, tolerance = next(iter(self.tolerances.items()))
            coarse = {kind: replace(tolerance, own=10 * tolerance.own)}
            if first_difference(expected, self.control(model), coarse) is None:
                raise ValueError("random weights do not show whether it changes the result")
        return first_difference(expected, self.changed(model), self.tolerances)


def first_difference(
    expected: Mapping[str, Values], actual: Results, tolerances: Tolerances
) -> Difference | None:
    """Return the first difference beyond its limit, by kind in the order of `tolerances`; of
    gradients, the worst."""
    for kind, tolerance in tolerances.items():
        limits = tolerance.limits(expected.get(kind, {}))
        by_name = distances(expected.get(kind, {}), actual.get(kind, {}))
        large = {name: d for name, d in by_name.items() if d > limits.get(name, 0.0)}
        if large:
            name = worst(large, limits) if kind == GRADIENT else next(iter(large))
            return Difference(kind, name, large[name], limits.get(name, 0.0))
    return None


def distances(
    expected: Values, actual: Mapping[str, torch.Tensor | LocalTensor]
) -> dict[str, float]:
    """Return the largest difference of each tensor; infinite if it is NaN, or if only one side has
    the tensor or has it in this shape."""
    names = dict.fromkeys([*expected, *actual])
    return {name: _distance(expected.get(name), actual.get(name)) for name in names}


def _distance(one: torch.Tensor | None, other: torch.Tensor | LocalTensor | None) -> float:
    if one is None or other is None:
        return math.inf
    if isinstance(other, LocalTensor):
        assert other.shard.shape == one.shape
        one, other = other.shard.take(one), other.tensor
    if one.shape != other.shape:
        return math.inf
    distance = largest_value(other - one)
    return math.inf if math.isnan(distance) else distance


def worst(by_name: Mapping[str, float], limits: Mapping[str, float]) -> str:
    """Return the name whose distance is closest to its limit, or farthest beyond it."""

    def excess(name: str) -> tuple[float, float]:
        limit = limits.get(name, 0.0)
        return by_name[name] / limit if limit else math.inf, by_name[name]

    return max(by_name, key=excess)


def largest_value(tensor: torch.Tensor) -> float:
    """Return the largest absolute value of a tensor; 0 if it is empty."""
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def _require_finite(results: Mapping[str, Values]) -> None:
    for values in results.values():
        for name, tensor in values.items():
            if not torch.isfinite(tensor).all():
                raise ValueError(f"its {name} is not finite, so that nothing can be compared")


@torch.no_grad()
def run_forward(model: PreTrainedModel, **inputs: torch.Tensor) -> dict[str, Values]:
    """Return `forward_results` of `model` for these inputs."""
    return forward_results(model(**inputs, use_cache=False))


def forward_results(outputs: Any) -> dict[str, Values]:
    """Return the logits of a model's outputs, and the router's auxiliary loss if it has one."""
    loss = auxiliary_loss(outputs)
    losses = {} if loss is None else {"auxiliary loss": loss.detach()}
    return {OUTPUT: {"logits": outputs.logits.detach()}, LOSS: losses}


def training_results(model: PreTrainedModel, seed: int = 0) -> dict[str, Values]:
    """Return the loss that `model` itself computes of random tokens, or the mean square of its
    scores, and every gradient."""
    model.zero_grad(set_to_none=True)
    ids = proxy_tokens(model, seed=seed).to(next(model.parameters()).device)
    if has_score_head(model):
        loss = model(input_ids=ids, use_cache=False).logits.square().mean()
    else:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return {LOSS: {"loss": loss.detach()}, GRADIENT: pop_gradients(model)}


def pop_gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Remove the gradients of `model` and return them by parameter, zeros for those without
    one."""
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }
    model.zero_grad(set_to_none=True)
    return gradients


_DEADLOCK_SECONDS = 60.0


class RankThreads:
    """An exchange among threads of this process; each enters `as_rank` first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._local = threading.local()
        self._barrier = threading.Barrier(size, timeout=_DEADLOCK_SECONDS)
        self._sent: list[Any] = [None] * size

    @property
    def rank(self) -> int:
        rank: int = self._local.rank
        return rank

    @contextmanager
    def as_rank(self, rank: int) -> Iterator[None]:
        """Inside, this thread is rank `rank`. If it fails, it releases the others, which would wait
        for it."""
        self._local.rank = rank
        try:
            yield
        except BaseException:
            self._barrier.abort()
            raise

    def all_to_all(self, blocks: torch.Tensor) -> torch.Tensor:
        """See `bigtrain.models.parallel.sequence_exchange.Exchange`."""
        return torch.stack(self._exchange(list(blocks)))

    def start(self, to: int, sent: Message, source: int, received: Message) -> Wait:
        """See `bigtrain.models.parallel.ring_attention.RingExchange`."""
        empty = torch.empty(0)
        parts = [empty] * self.size
        parts[to] = empty if sent is None else sent
        arrived = self._exchange(parts)[source]
        if received is not None:
            received.copy_(arrived)
        return _already_done

    def rows(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """See `bigtrain.models.parallel.collectives.RowExchange`."""
        parts = self._exchange(list(x.split(sent)))
        assert [len(part) for part in parts] == received
        return torch.cat(parts)

    def _exchange(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        self._sent[self.rank] = parts
        self._barrier.wait()
        received = [sent[self.rank].clone() for sent in self._sent]
        self._barrier.wait()
        return received


class RankThreadsOfGroup:
    """Exchange within groups of equal size of the threads of `everyone`. groups: which ranks are
    in each. All threads exchange at the same time."""

    def __init__(self, everyone: RankThreads, groups: Sequence[Sequence[int]]) -> None:
        self._everyone = everyone
        self._group_of = {rank: group for group in groups for rank in group}
        self.size = len(groups[0])

    @property
    def _group(self) -> Sequence[int]:
        return self._group_of[self._everyone.rank]

    @property
    def rank(self) -> int:
        return self._group.index(self._everyone.rank)

    def all_to_all(self, blocks: torch.Tensor) -> torch.Tensor:
        """See `bigtrain.models.parallel.sequence_exchange.Exchange`."""
        sent = blocks.new_empty(self._everyone.size, *blocks.shape[1:])
        group = torch.tensor(self._group)
        sent[group] = blocks
        return self._everyone.all_to_all(sent)[group]

    def start(self, to: int, sent: Message, source: int, received: Message) -> Wait:
        """See `bigtrain.models.parallel.ring_attention.RingExchange`."""
        return self._everyone.start(self._group[to], sent, self._group[source], received)


def _already_done() -> None:
    pass
