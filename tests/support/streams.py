"""Sources of samples of user code, for runs of `tests/chaos` and `tests/parity`."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any


def item_of(number: int, length: int, weights: str = "") -> dict[str, Any]:
    """Return a sample that its number determines. weights: "fractions", or none."""
    chooser = random.Random(number)
    count = chooser.randint(3, length + 1)
    tokens = [chooser.randrange(1, 64) for _ in range(count)]
    labels = [-100 if chooser.random() < 0.2 else token for token in tokens[:-1]]
    item: dict[str, Any] = {"input_ids": tokens, "labels": [*labels, tokens[-1]]}
    if weights:
        item["loss_weights"] = [chooser.choice([0.0, 0.25, 0.5, 1.0, 3.5]) for _ in tokens[:-1]]
        item["loss_weights"].append(0.75)
    return item


class Items:
    """Map-style source of `count` items."""

    def __init__(self, length: int = 16, count: int = 300, weights: str = "") -> None:
        self.length, self.count, self.weights = length, count, weights

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return item_of(index, self.length, self.weights)


class Shuffled:
    """Endless items through a shuffle buffer, whose state is that of its generator and the numbers
    in the buffer. `fault` at item `at`, on the ranks of `ranks` (all by default)."""

    def __init__(
        self,
        length: int = 16,
        weights: str = "",
        fault: str = "",
        at: int = 30,
        ranks: tuple[int, ...] | list[int] = (),
    ) -> None:
        self.length, self.weights, self.at = length, weights, at
        rank = int(os.environ.get("RANK", "0"))
        self.fault = fault if not ranks or rank in ranks else ""
        self.random = random.Random(7)
        self.number = self.given = 0
        self.buffer: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        while True:
            while len(self.buffer) < 8:
                self.buffer.append(self.number)
                self.number += 1
            number = self.buffer.pop(self.random.randrange(len(self.buffer)))
            self.given += 1
            if self.fault == "ends" and self.given == self.at + 1:
                return
            if self.fault and self.given == self.at + 1:
                yield from self._faulty()
            else:
                yield item_of(number, self.length, self.weights)

    def _faulty(self) -> Iterator[Any]:
        if self.fault == "other":
            yield item_of(-1, self.length, self.weights)
        elif self.fault == "raises":
            raise RuntimeError("a shard of mine is gone")
        elif self.fault == "item":
            yield {"input_ids": [1.5, 2.5]}
        else:
            raise ValueError(self.fault)

    def state_dict(self) -> dict[str, Any]:
        version, words, gauss = self.random.getstate()
        return {
            "random": [version, list(words), gauss],
            "number": self.number,
            "given": self.given,
            "buffer": list(self.buffer),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        version, words, gauss = state["random"]
        self.random.setstate((version, tuple(words), gauss))
        self.number, self.given = state["number"], state["given"]
        self.buffer = list(state["buffer"])
