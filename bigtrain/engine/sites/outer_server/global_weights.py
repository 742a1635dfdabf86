"""Global weights, outer momentum and rounding error of a whole model, and the outer step on them.
No files and no communication."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from bigtrain.engine.sites.boxes import Box, Update, join_cuts
from bigtrain.engine.sites.codecs import CODECS, FloatCodec
from bigtrain.engine.sites.figures import square
from bigtrain.engine.sites.outer_update import outer_update
from bigtrain.settings.sections.sites import SitesSection

Parts = Callable[[], Iterable[tuple[list[Box], memoryview]]]
"""Reads the messages of a site: rectangles, and the codes of their values one after the other."""


class GlobalWeights:
    """The state of an outer server: float32, 4 bytes for each parameter (momentum and rounding
    error as much again, where there are any); 8 more while a step is made.

    shapes: of all parameters that are trained. absolute: whether sites send weights where the codec
    may (float32); else always differences. record: of the last outer step, as JSON.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], sites: SitesSection, *, absolute: bool
    ) -> None:
        self.shapes = dict(shapes)
        self.sites = sites
        codec = CODECS[sites.codec]
        self._codec = codec
        self.is_relative = codec.is_relative or not absolute
        self._count = sum(math.prod(shape) for shape in self.shapes.values())
        self._weights = torch.zeros(self._count)
        self._momentum = torch.zeros(self._count) if sites.outer.has_momentum else None
        self._error = torch.zeros(self._count) if codec.keeps_error else None
        self._updates: dict[str, Update] | None = None
        self._begins: dict[str, int] = {}
        begin = 0
        for name, shape in self.shapes.items():
            self._begins[name] = begin
            begin += math.prod(shape)
        self._num_filled = 0
        self.is_ready = False
        self.record: dict[str, Any] = {"number": 0, "step": 0, "sites": [], "tokens": {}}

    @property
    def number(self) -> int:
        """Of the last outer step; 0 before the first."""
        return int(self.record["number"])

    def tensors(self) -> dict[str, torch.Tensor]:
        """What `restore` needs beside the record."""
        states = {"weights": self._weights, "momentum": self._momentum, "error": self._error}
        return {name: state for name, state in states.items() if state is not None}

    def restore(self, tensors: Mapping[str, torch.Tensor], record: Mapping[str, Any]) -> None:
        """Continue from a state that was kept."""
        for name, state in self.tensors().items():
            state.copy_(tensors[name])
        self.record, self.is_ready = dict(record), True

    def begin(self, boxes: Sequence[Box], values: torch.Tensor) -> None:
        """Fill rectangles of the initial weights with flat `values`."""
        begin = 0
        for box in boxes:
            place = box.of(self._of(self._weights, box.name))
            place.copy_(values[begin : begin + box.count].view(box.sizes))
            begin += box.count
        self._num_filled += begin

    def ready(self) -> None:
        """The initial weights are complete. Raises ValueError if they are not."""
        if self._num_filled != self._count:
            filled, self._num_filled = self._num_filled, 0
            raise ValueError(f"{filled} of {self._count} initial weights came: send all again")
        self.is_ready = True

    def refuse_payload(self, boxes: Sequence[Box], payload: memoryview) -> None:
        """Raises ValueError unless `payload` has the length of the codes of `boxes`."""
        expected = self._codec.num_bytes(sum(box.count for box in boxes))
        if len(payload) != expected:
            raise ValueError(f"{len(payload)} bytes where {expected} were expected")

    def refuse_incomplete(self, messages: Iterable[Sequence[Box]]) -> None:
        """Raises ValueError unless `messages` have as many elements as the model."""
        count = sum(box.count for boxes in messages for box in boxes)
        if count != self._count:
            raise ValueError(f"{count} of {self._count} elements are here")

    @torch.no_grad()
    def step(
        self, tokens: Mapping[int, int], parts: Mapping[int, Parts], share: float, step: int
    ) -> None:
        """One outer step with the mean of what sites have sent, by their `tokens`.

        share: of the mean's change that counts; less than 1 only for relative codes. step: the
        sites' optimizer steps at it.
        """
        mean = self._mean(tokens, parts)
        distances = {str(site): self._distance(parts[site], mean) for site in parts}
        updates = {}
        begin = 0
        for name, shape in self.shapes.items():
            end = begin + math.prod(shape)
            weights, before = self._weights[begin:end], self._weights[begin:end].clone()
            value = mean[begin:end]
            target = (weights.double() + share * value if self.is_relative else value).float()
            momentum = None if self._momentum is None else self._momentum[begin:end]
            outer_update(weights, momentum, target, self.sites)
            if self._codec.is_relative:
                # What sites can be told becomes the weights; the rest is kept for later.
                change = weights - before
                if self._error is not None:
                    change += self._error[begin:end]
                update = Update(self._codec, change.view(shape))
                told = update.values.reshape(-1)
                torch.add(before, told, out=weights)
                if self._error is not None:
                    self._error[begin:end] = change - told
            else:
                update = Update(self._codec, weights.view(shape).clone())
            updates[name] = update
            begin = end
        self._updates = updates
        self.record = {
            "number": self.number + 1,
            "step": max(step, int(self.record["step"])),
            "sites": sorted(tokens),
            "tokens": {str(site): count for site, count in tokens.items()},
            "distances": distances if share == 1 else {},
            "share": share,
            "time": time.time(),
        }

    def cut(self, boxes: Sequence[Box], form: str) -> tuple[dict[str, Any], bytes]:
        """Rectangles of the last ``update`` where it is known, else of the weights (``full``)."""
        if form == "update" and self._updates is not None:
            cuts = [self._updates[box.name].cut(box) for box in boxes]
            return {"form": "update"}, join_cuts(self._codec, cuts)
        full = [box.of(self._of(self._weights, box.name)).reshape(-1) for box in boxes]
        plain = FloatCodec(torch.float32, is_relative=False)
        return {"form": "full"}, join_cuts(plain, [(one, None) for one in full])

    def _mean(self, tokens: Mapping[int, int], parts: Mapping[int, Parts]) -> torch.Tensor:
        """The mean of the values that sites sent, float64, in the order of the sites."""
        total = torch.zeros(self._count, dtype=torch.float64)
        for site in sorted(parts):
            for box, values in self._values(parts[site]):
                box.of(self._of(total, box.name)).add_(values.double(), alpha=tokens[site])
        return total.div_(sum(tokens.values()))

    def _distance(self, parts: Parts, mean: torch.Tensor) -> float:
        """Root mean square of the difference between what a site has sent and the mean."""
        total = 0.0
        for box, values in self._values(parts):
            total += square(values.double(), box.of(self._of(mean, box.name)))
        return math.sqrt(total / self._count)

    def _values(self, parts: Parts) -> Iterator[tuple[Box, torch.Tensor]]:
        """The rectangles of a site, with the values that it sent, float32."""
        for boxes, payload in parts():
            raw = torch.frombuffer(bytearray(payload), dtype=torch.uint8).unsqueeze(0)
            values = self._codec.decode(raw, sum(box.count for box in boxes))[0]
            begin = 0
            for box in boxes:
                yield box, values[begin : begin + box.count].view(box.sizes)
                begin += box.count

    def _of(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        """The parameter `name` in a flat tensor of all: a view."""
        begin, shape = self._begins[name], self.shapes[name]
        return flat[begin : begin + math.prod(shape)].view(shape)
