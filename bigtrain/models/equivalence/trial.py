"""The harness of all equivalence trials, also of `bigtrain parity`: runs a proxy model without and
with one change on the same batch, and reports the first difference."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers import PreTrainedModel

from bigtrain.models.equivalence.proxy_model import proxy_tokens
from bigtrain.models.experts import auxiliary_loss
from bigtrain.models.layers.parameters import has_score_head
from bigtrain.models.parallel.sharding import Shard

if TYPE_CHECKING:
    from bigtrain.models.parallel.ring_attention import Message, Wait

_T = TypeVar("_T")
OUTPUT, LOSS, GRADIENT = "output", "loss", "gradient"
"""Categories of compared tensors, in the order of a step."""


@dataclass(frozen=True)
class LocalTensor:
    """The shard of a tensor that a rank computed, for comparison with the full tensor."""

    tensor: torch.Tensor
    shard: Shard


Values = Mapping[str, torch.Tensor]
Results = Mapping[str, Mapping[str, torch.Tensor | LocalTensor]]
"""Tensors of a run by category and name: ``results[GRADIENT]["model.norm.weight"]``."""
Run = Callable[[PreTrainedModel], Results]


@dataclass(frozen=True)
class Tolerance:
    """Largest difference that counts as rounding, a sum of three terms. relative: to the tensor's
    largest value. common: to the largest value in the category's tensors. absolute: in the tensor's
    unit."""

    relative: float = 0.0
    common: float = 0.0
    absolute: float = 0.0

    def limits(self, expected: Values) -> dict[str, float]:
        """Return the largest allowed difference for every tensor."""
        largest = {name: largest_value(tensor) for name, tensor in expected.items()}
        common = self.absolute + self.common * max(largest.values(), default=0.0)
        return {name: self.relative * value + common for name, value in largest.items()}


Tolerances = Mapping[str, Tolerance]

SHARDED = {LOSS: Tolerance(relative=1e-5), GRADIENT: Tolerance(relative=1e-3, common=1e-6)}
"""For sharded models. Rounding of float32 is far below both tolerances, and a missing part of a
gradient or a wrong factor far above."""


@dataclass(frozen=True)
class Difference:
    """A tensor that differs by more than rounding. distance: the largest difference of an element.
    limit: the largest difference that counts as rounding."""

    category: str
    name: str
    distance: float
    limit: float

    @property
    def where(self) -> str:
        """The tensor, for example "gradient of model.norm.weight"."""
        return f"gradient of {self.name}" if self.category == GRADIENT else self.name

    @property
    def size(self) -> str:
        return f"by {self.distance:.2g}, rounding is below {self.limit:.2g}"


@dataclass(frozen=True)
class Trial:
    """One change of a model, and the differences that count as rounding.

    plain, changed: compute the results of a model without and with the change; `plain` leaves the
    model unchanged. control: computes the results of a wrong change; these have to differ in the
    first category of `tolerances` by ten times the tolerance, or the comparison would detect
    nothing.
    """

    plain: Run
    changed: Run
    tolerances: Tolerances
    control: Run | None = None

    def difference(self, model: PreTrainedModel) -> Difference | None:
        """Return the first difference of `plain` and `changed`; None if there is none. Raises
        ValueError if the model or the trial is unsuitable, and any exception of the model's
        code."""
        expected: Any = self.plain(model)
        for values in expected.values():
            for name, tensor in values.items():
                if not torch.isfinite(tensor).all():
                    raise ValueError(f"its {name} is not finite, so that nothing can be compared")
        if self.control is not None:
            category, tolerance = next(iter(self.tolerances.items()))
            coarse_tolerances = {category: replace(tolerance, relative=10 * tolerance.relative)}
            if first_difference(expected, self.control(model), coarse_tolerances) is None:
                raise ValueError("random weights do not show whether it changes the result")
        return first_difference(expected, self.changed(model), self.tolerances)


def first_difference(
    expected: Mapping[str, Values], actual: Results, tolerances: Tolerances
) -> Difference | None:
    """Return the first difference beyond its limit, by category in the order of `tolerances`. Among
    gradients, return the difference that is largest relative to its limit."""
    for category, tolerance in tolerances.items():
        limits = tolerance.limits(expected.get(category, {}))
        all_distances = distances(expected.get(category, {}), actual.get(category, {}))
        excessive = {n: d for n, d in all_distances.items() if d > limits.get(n, 0.0)}
        if excessive:
            name = worst(excessive, limits) if category == GRADIENT else next(iter(excessive))
            return Difference(category, name, excessive[name], limits.get(name, 0.0))
    return None


def distances(
    expected: Values, actual: Mapping[str, torch.Tensor | LocalTensor]
) -> dict[str, float]:
    """Return the largest difference by tensor; infinite if the difference is NaN, the shapes
    differ, or only one side has the tensor."""
    distance_by_name = {}
    for name in dict.fromkeys([*expected, *actual]):
        distance_by_name[name] = math.inf
        expected_tensor, tensor = expected.get(name), actual.get(name)
        if expected_tensor is None or tensor is None:
            continue
        if isinstance(tensor, LocalTensor):
            assert tensor.shard.shape == expected_tensor.shape
            expected_tensor, tensor = tensor.shard.take(expected_tensor), tensor.tensor
        if expected_tensor.shape == tensor.shape:
            distance = largest_value(tensor - expected_tensor)
            distance_by_name[name] = math.inf if math.isnan(distance) else distance
    return distance_by_name


def worst(distance_by_name: Mapping[str, float], limits: Mapping[str, float]) -> str:
    """Return the name with the largest ratio of distance to limit; among equal ratios, with the
    largest distance."""

    def excess(name: str) -> tuple[float, float]:
        distance, limit = distance_by_name[name], limits.get(name, 0.0)
        return distance / limit if limit else math.inf, distance

    return max(distance_by_name, key=excess)


def largest_value(tensor: torch.Tensor) -> float:
    """Return the largest absolute value of a tensor; 0 if it is empty."""
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


@torch.no_grad()
def run_forward(model: PreTrainedModel, **inputs: torch.Tensor) -> dict[str, Values]:
    """Return `forward_results` of `model` for these inputs."""
    return forward_results(model(**inputs, use_cache=False))


def forward_results(outputs: Any) -> dict[str, Values]:
    """Return the logits of a model's outputs, and the auxiliary loss of a model with a router."""
    loss = auxiliary_loss(outputs)
    losses = {} if loss is None else {"auxiliary loss": loss.detach()}
    return {OUTPUT: {"logits": outputs.logits.detach()}, LOSS: losses}


def training_results(model: PreTrainedModel, seed: int = 0) -> dict[str, Values]:
    """Return the loss that `model` itself computes for random tokens (for a score head, the mean
    square of the scores), and every gradient."""
    model.zero_grad(set_to_none=True)
    ids = proxy_tokens(model, seed=seed).to(next(model.parameters()).device)
    if has_score_head(model):
        loss = model(input_ids=ids, use_cache=False).logits.square().mean()
    else:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    # A state that a layer stores (RG-LRU) keeps the graph, and with it the shapes of parameters.
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if torch.is_tensor(value) and value.grad_fn is not None:
                setattr(module, name, value.detach())
    return {LOSS: {"loss": loss.detach()}, GRADIENT: pop_gradients(model)}


def pop_gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Remove the gradients of `model`, and return a gradient for every parameter; zeros for a
    parameter without a gradient."""
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }
    model.zero_grad(set_to_none=True)
    return gradients


_DEADLOCK_SECONDS = 60.0


class RankThreads:
    """An exchange among threads of this process that `run` starts."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._local = threading.local()
        self._barrier = threading.Barrier(size, timeout=_DEADLOCK_SECONDS)
        self._sent: list[Any] = [None] * size

    @property
    def rank(self) -> int:
        rank: int = self._local.rank
        return rank

    def run(self, compute: Callable[[int], _T]) -> list[_T]:
        """Return the results of `compute`, called for each rank in a separate thread. Raises the
        error of the first rank that failed; this failure ends the waiting of all other ranks, whose
        BrokenBarrierErrors are ignored."""

        def compute_as(rank: int) -> _T:
            self._local.rank = rank
            try:
                return compute(rank)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            tasks = [pool.submit(compute_as, rank) for rank in range(self.size)]
        errors = [task.exception() for task in tasks]
        failures = [error for error in errors if error is not None]
        if failures:
            # False sorts before True.
            raise min(failures, key=lambda error: isinstance(error, threading.BrokenBarrierError))
        return [task.result() for task in tasks]

    def all_to_all(self, blocks: torch.Tensor) -> torch.Tensor:
        """See `bigtrain.models.parallel.ring_attention.Exchange`."""
        return torch.stack(self._exchange(list(blocks)))

    def start(self, target: int, sent: Message, source: int, received: Message) -> Wait:
        """See `bigtrain.models.parallel.ring_attention.Exchange`."""
        parts = [torch.empty(0)] * self.size
        if sent is not None:
            parts[target] = sent
        arrived = self._exchange(parts)[source]
        if received is not None:
            received.copy_(arrived)
        return lambda: None  # there is nothing to wait for

    def rows(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """See `bigtrain.models.parallel.collectives.RowExchange`."""
        parts = self._exchange(list(x.split(sent)))
        assert [len(part) for part in parts] == received
        return torch.cat(parts)

    def _exchange(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """Send ``parts[rank]`` to every rank; return the parts from every rank."""
        self._sent[self.rank] = parts
        self._barrier.wait()
        received = [sent[self.rank].clone() for sent in self._sent]
        self._barrier.wait()
        return received


class RankThreadsOfGroup:
    """An exchange within groups of the threads of `everyone`. groups: the ranks of each group, all
    of equal size. All threads exchange at the same time."""

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
        """See `bigtrain.models.parallel.ring_attention.Exchange`."""
        sent = blocks.new_empty(self._everyone.size, *blocks.shape[1:])
        group = torch.tensor(self._group)
        sent[group] = blocks
        return self._everyone.all_to_all(sent)[group]

    def start(self, target: int, sent: Message, source: int, received: Message) -> Wait:
        """See `bigtrain.models.parallel.ring_attention.Exchange`."""
        return self._everyone.start(self._group[target], sent, self._group[source], received)
