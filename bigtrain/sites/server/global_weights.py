"""Global weights, outer momentum and rounding error of a whole model, and the outer step on them.
No files and no communication."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from bigtrain.settings.sections.sites import SitesSection
from bigtrain.sites.codecs import CODECS, FloatCodec, is_finite
from bigtrain.sites.contribution import UnusableError, decoded, refuse_norm
from bigtrain.sites.metrics import square
from bigtrain.sites.outer_optimizer import outer_update
from bigtrain.sites.protocol import MOST_TOKENS, StepRecord
from bigtrain.sites.rectangles import EncodedRectangle, ParameterBox, Update, join_rectangles

_FLOAT32 = FloatCodec(torch.float32, is_relative=False)


@dataclass(frozen=True)
class NextStep:
    """The state after an outer step that does not count yet (`GlobalWeights.commit`).

    tensors: weights, momentum and rounding error; updates: by parameter; record: of the step.
    """

    tensors: dict[str, torch.Tensor]
    updates: dict[str, Update]
    record: dict[str, Any]


Parts = Callable[[], Iterable[tuple[list[ParameterBox], memoryview]]]
"""Reads the messages of a site: for each its rectangles, and the codes of their values in order."""


class GlobalWeights:
    """The state of an outer server. Memory for each parameter: 4 bytes (float32) for weights,
    momentum and rounding error each, if the run has them; while a step is made, the same for the
    new state, and 8 bytes for the mean.

    shapes: of every trained parameter. absolute: whether sites send weights if the codec
    is absolute (float32); else they send differences. tensors, record: the state, and its outer
    step as JSON; a restart needs both.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], sites: SitesSection, *, absolute: bool
    ) -> None:
        self.shapes = dict(shapes)
        self.sites = sites
        codec = CODECS[sites.codec]
        self._codec = codec
        self.is_relative = codec.is_relative or not absolute
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        self._count, ends = sum(sizes), accumulate(sizes)
        self._ranges = {
            name: slice(end - size, end)
            for name, size, end in zip(self.shapes, sizes, ends, strict=True)
        }
        state_names = ["weights"]
        if sites.outer.has_momentum:
            state_names.append("momentum")
        if codec.keeps_error:
            state_names.append("error")
        self.tensors = {name: torch.zeros(self._count) for name in state_names}
        self._updates: dict[str, Update] | None = None
        self._is_filled = torch.zeros(0, dtype=torch.bool)
        self.is_ready = False
        self.record: dict[str, Any] = StepRecord().model_dump(mode="json")

    @property
    def number(self) -> int:
        """The last outer step; 0 before the first."""
        return int(self.record["number"])

    def restore(self, tensors: Mapping[str, torch.Tensor], record: Mapping[str, Any]) -> None:
        """Continue from a stored state."""
        for name, state in self.tensors.items():
            state.copy_(tensors[name])
        self.record, self.is_ready = dict(record), True

    def begin_again(self) -> None:
        """Discard the initial weights that were received so far."""
        self._is_filled = torch.zeros(0, dtype=torch.bool)

    def begin(self, boxes: Sequence[ParameterBox], payload: memoryview) -> None:
        """Fill rectangles of the initial weights with float32 values; repeated values change
        nothing. Raises ValueError for values that are not finite, for a wrong number of values, and
        for rectangles that were filled partly, or with other values."""
        if len(payload) % 4 or not payload:
            raise ValueError(f"{len(payload)} bytes are not float32 values")
        values = torch.frombuffer(bytearray(payload), dtype=torch.float32)
        count = sum(box.num_elements for box in boxes)
        if values.numel() != count:
            raise ValueError(f"{values.numel()} values where {count} were expected")
        if not is_finite(values):
            raise ValueError("initial weights that are not finite")
        if not self._is_filled.numel():
            self._is_filled = torch.zeros(self._count, dtype=torch.bool)
        for box, box_values in _by_box(boxes, values):
            current = self._cut(self.tensors["weights"], box)
            is_filled = self._cut(self._is_filled, box)
            if is_filled.any() and not (is_filled.all() and torch.equal(current, box_values)):
                raise ValueError(f"initial weights of {box.name} came twice, with other values")
            current.copy_(box_values)
            is_filled.fill_(True)

    def refuse_unfilled(self) -> None:
        """Raise ValueError unless all initial weights were received."""
        filled = int(self._is_filled.sum())
        if filled != self._count:
            raise ValueError(f"{filled} of {self._count} initial weights came")

    def ready(self) -> None:
        """Count the initial weights as the global ones."""
        self.is_ready, self._is_filled = True, torch.zeros(0, dtype=torch.bool)

    def refuse_payload(self, boxes: Sequence[ParameterBox], payload: memoryview) -> None:
        """Raise ValueError unless `payload` has the length of the codes of `boxes`, UnusableError
        for codes that a site does not make from finite values."""
        count = sum(box.num_elements for box in boxes)
        expected = self._codec.num_bytes(count)
        if len(payload) != expected:
            raise ValueError(f"{len(payload)} bytes where {expected} were expected")
        self._decoded(payload, count)

    def refuse_contribution(self, parts: Parts) -> None:
        """Raise ValueError unless the messages of a site have every element of the model once,
        UnusableError for values that are not finite or too far from the weights."""
        is_received = torch.zeros(self._count, dtype=torch.bool)
        change, weights = 0.0, self.tensors["weights"]
        for box, values in self._values(parts):
            is_box_received = self._cut(is_received, box)
            if is_box_received.any():
                raise ValueError(f"elements of {box.name} came twice")
            is_box_received.fill_(True)
            box_weights = self._cut(weights, box)
            change += square(values, torch.zeros(()) if self.is_relative else box_weights)
        count = int(is_received.sum())
        if count != self._count:
            raise ValueError(f"{count} of {self._count} elements are here")
        refuse_norm(change, square(weights, torch.zeros(())), self._count)

    @torch.no_grad()
    def step(
        self, tokens: Mapping[int, int], parts: Mapping[int, Parts], share: float, step: int
    ) -> NextStep:
        """Compute an outer step with the mean of what sites have sent, by their `tokens`; changes
        nothing. Raises UnusableError if the weights after it would not be finite.

        share: of the mean's change that counts; less than 1 only for relative codes. step: the
        sites' optimizer steps at it.
        """
        if not all(0 < count <= MOST_TOKENS for count in tokens.values()):
            raise UnusableError(f"tokens {dict(tokens)}: 1 to {MOST_TOKENS:,} are possible")
        # The mean in float64 and in the order of the sites, and each site's distance to the mean.
        mean = torch.zeros(self._count, dtype=torch.float64)
        for site in sorted(parts):
            for box, values in self._values(parts[site]):
                self._cut(mean, box).add_(values.double(), alpha=tokens[site])
        mean.div_(sum(tokens.values()))
        distances = {}
        for site in parts:
            total = 0.0
            for box, values in self._values(parts[site]):
                total += square(values.double(), self._cut(mean, box))
            distances[str(site)] = math.sqrt(total / self._count)

        # The state after the step, in copies: the step does not count yet.
        new_states = {name: state.clone() for name, state in self.tensors.items()}
        updates = {}
        for name, element_range in self._ranges.items():
            states = {state_name: state[element_range] for state_name, state in new_states.items()}
            updates[name] = self._step_parameter(
                states, mean[element_range], self.shapes[name], share
            )
        for state_name, state in new_states.items():
            if not is_finite(state):
                raise UnusableError(f"{state_name} that would not be finite")
        record = {
            "number": self.number + 1,
            "step": max(step, int(self.record["step"])),
            "sites": sorted(tokens),
            "tokens": {str(site): count for site, count in tokens.items()},
            "distances": distances if share == 1 else {},
            "share": share,
            "time": time.time(),
        }
        return NextStep(new_states, updates, record)

    def commit(self, after: NextStep) -> None:
        """Take the state after an outer step, which is on disk."""
        self.tensors, self._updates, self.record = after.tensors, after.updates, after.record

    def _step_parameter(
        self,
        states: Mapping[str, torch.Tensor],
        mean: torch.Tensor,
        shape: tuple[int, ...],
        share: float,
    ) -> Update:
        """Make an outer step on the states of a parameter, flat views that are changed in place;
        return the update that sites receive. mean: of the sites' weights, or of differences
        if `is_relative`."""
        weights, error = states["weights"], states.get("error")
        old_weights = weights.clone()
        target = (weights.double() + share * mean if self.is_relative else mean).float()
        outer_update(weights, states.get("momentum"), target, self.sites)
        if not self._codec.is_relative:  # sites receive weights, even if they sent differences
            return Update(self._codec, weights.view(shape).clone())
        # The encoded update, which sites receive, becomes the weights; its error is kept for later.
        change = weights - old_weights
        if error is not None:
            change += error
        update = Update(self._codec, change.view(shape))
        sent_update = update.values.reshape(-1)
        torch.add(old_weights, sent_update, out=weights)
        if error is not None:
            error.copy_(change - sent_update)
        return update

    def cut(self, boxes: Sequence[ParameterBox], form: str) -> tuple[dict[str, Any], bytes]:
        """Return the header and the payload of a reply with rectangles: of the last ``update`` if
        that is the requested `form` and the update is in memory, else of the weights (``full``)."""
        if form == "update" and self._updates is not None:
            encoded = [self._updates[box.name].cut(box) for box in boxes]
            return {"form": "update"}, join_rectangles(self._codec, encoded)
        weights = (self._cut(self.tensors["weights"], box).reshape(-1) for box in boxes)
        full = [EncodedRectangle(elements, None) for elements in weights]
        return {"form": "full"}, join_rectangles(_FLOAT32, full)

    def _values(self, parts: Parts) -> Iterator[tuple[ParameterBox, torch.Tensor]]:
        """Yield the rectangles of a site, with the values that it sent, float32."""
        for boxes, payload in parts():
            yield from _by_box(
                boxes, self._decoded(payload, sum(box.num_elements for box in boxes))
            )

    def _decoded(self, payload: memoryview, count: int) -> torch.Tensor:
        """Return the `count` values of a message, flat. Raises UnusableError."""
        if not count:
            return torch.empty(0)
        raw = torch.frombuffer(bytearray(payload), dtype=torch.uint8).unsqueeze(0)
        return decoded(self._codec, raw, count)[0]

    def _cut(self, flat: torch.Tensor, box: ParameterBox) -> torch.Tensor:
        """Return a rectangle in a flat tensor of all parameters: a view."""
        return flat[self._ranges[box.name]].view(self.shapes[box.name])[box.slices]


def _by_box(
    boxes: Sequence[ParameterBox], values: torch.Tensor
) -> Iterator[tuple[ParameterBox, torch.Tensor]]:
    """Yield the rectangles with their part of flat `values`."""
    flats = values.split([box.num_elements for box in boxes])
    yield from ((box, flat.view(box.sizes)) for box, flat in zip(boxes, flats, strict=True))
