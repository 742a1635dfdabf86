"""Samples from a stream of the user: an iterator with a state, which each checkpoint contains.

Sample ``i`` of a run is item ``i`` of the stream. Every process reads the complete stream and keeps
the items of its own rows, so that the order does not depend on the number of ranks, and one state
is that of all. The cost: each process produces the items of the global batch, not of its rows.

The reader is ahead of the training. So it records the position of the stream where each step ends,
and a checkpoint contains that of its own step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import numpy as np
import xxhash

from bigtrain.data.samples.items import Item, ItemReader, put_item
from bigtrain.data.samples.token_stream import Indices, TokenRows
from bigtrain.errors import DataError, ExtensionError
from bigtrain.settings.extensions import describe, location

NUM_SAMPLES = 1 << 40
"""Samples of a stream, whose number is unknown, where one is needed: more than any run reads."""
STATE_BYTES = 1 << 20
"""Largest state, as JSON: it is part of ``state.json``, and read after every step."""
_PROBES = 8
_KEPT_POSITIONS = 4
"""Ends of steps whose positions are known: that of the last step, and those that are read ahead."""


@dataclass(frozen=True)
class StreamPosition:
    """Position of a stream before its item `sample`. checksum: of all items before it, 16
    hexadecimal digits. state: of the stream, as JSON has it."""

    sample: int
    checksum: str
    state: Any

    @classmethod
    def from_json(cls, tree: Mapping[str, Any] | None) -> StreamPosition | None:
        """Build from `dataclasses.asdict`; None: a checkpoint without a stream."""
        return None if tree is None else cls(**tree)


class SampleStream:
    """Stream of the user, which every reader opens again. `make` returns one at its beginning."""

    def __init__(
        self, make: Callable[[], Any], items: ItemReader, token_dtype: np.dtype[Any]
    ) -> None:
        self.items, self.token_dtype = items, token_dtype
        self._make = make

    def open(self, position: StreamPosition | None) -> OpenStream:
        """Open the stream at `position`; None: at its beginning. Raises ExtensionError if it
        fails."""
        return OpenStream(self._make(), self.items, position)

    def identity(self, settings: Mapping[str, Any]) -> int:
        """Return a checksum of the name, settings and first items, which also decide whether losses
        have weights. Raises ExtensionError if the stream fails, DataError if it is not the same
        when it is opened again, at its beginning or at a state that it returned."""
        stream = self.open(None)
        positions, contents, weighs = [], [], False
        for _ in range(_PROBES):
            positions.append(stream.position())
            item = stream.next()
            contents.append(_bytes_of(item))
            weighs |= item.weights is not None
        self.items = replace(self.items, weighs=weighs)
        for first in (0, _PROBES // 2):
            again = self.open(positions[first] if first else None)
            for number in range(first, _PROBES):
                if _bytes_of(again.next()) != contents[number]:
                    raise self._other(first, number)
        text = json.dumps([self.items.name, settings, self.items.sequence_length])
        return xxhash.xxh3_64_intdigest(text.encode() + b"".join(contents))

    def _other(self, first: int, number: int) -> DataError:
        if first == 0:
            rule = "is another one when the stream is made again, so that a run could not resume"
            return self.items.wrong(number, rule, "let the items depend on the settings only")
        rule = (
            f"is another one when a new stream gets the state from before item {first}, by "
            "load_state_dict, so that a run could not resume"
        )
        fix = "let state_dict() determine the next item, also while __iter__ is at a yield"
        return self.items.wrong(number, rule, fix)


def _bytes_of(item: Item) -> bytes:
    return item.tokens.tobytes() + item.targets.tobytes() + item.weight_bytes


def rewound_by(stream: Any, items: ItemReader) -> Callable[[], Any]:
    """Return a function that returns `stream`, an object of the calling program, in the state that
    it has now. Raises ExtensionError and DataError if it has none."""
    begin = OpenStream(stream, items, None).state_text()

    def rewound() -> Any:
        OpenStream.load(stream, items, begin)
        return stream

    return rewound


class OpenStream:
    """Iterator over the items of a stream from a position on. sample: number of the next item. One
    that has failed raises the same error again: the number of what follows is not known."""

    def __init__(self, stream: Any, items: ItemReader, position: StreamPosition | None) -> None:
        self.sample = 0 if position is None else position.sample
        self._checksum = 0 if position is None else int(position.checksum, 16)
        self._stream, self._items = stream, items
        self._failure: DataError | ExtensionError | None = None
        if position is not None:
            self.load(stream, items, json.dumps(position.state))
        try:
            self._iterator = iter(stream)
        except Exception as error:
            raise self._failed("__iter__", error) from error

    @staticmethod
    def load(stream: Any, items: ItemReader, text: str) -> None:
        """Give a stream a state. Raises ExtensionError if it fails."""
        try:
            stream.load_state_dict(json.loads(text))
        except Exception as error:
            raise ExtensionError(
                f"{items.name}: load_state_dict raised {describe(error, items.kind)} -> correct "
                "it; the state is what state_dict returned, as JSON has it"
            ) from error

    def next(self) -> Item:
        """Return the next item as a sample. Raises ExtensionError if the stream fails, DataError if
        it has ended or the item is not a sample."""
        if self._failure is not None:
            raise self._failure
        try:
            return self._next()
        except (DataError, ExtensionError) as error:
            self._failure = error
            raise

    def _next(self) -> Item:
        try:
            item = next(self._iterator)
        except StopIteration:
            items = self._items
            raise DataError(
                f"{items.name}: the stream ended after {self.sample} items, and the run needs more "
                f"({location(items.kind)}) -> let __iter__ begin again (while True), or set a "
                "smaller train.steps"
            ) from None
        except Exception as error:
            raise self._failed(f"item {self.sample}", error) from error
        parsed = self._items.parse(self.sample, item)
        self._checksum = xxhash.xxh3_64_intdigest(_bytes_of(parsed), seed=self._checksum)
        self.sample += 1
        return parsed

    def position(self) -> StreamPosition:
        """Return the position before the next item. Raises as `state_text`."""
        return StreamPosition(self.sample, f"{self._checksum:016x}", json.loads(self.state_text()))

    def state_text(self) -> str:
        """Return the state as JSON. Raises ExtensionError if the stream fails, DataError if its
        state is not JSON or too large."""
        try:
            state = self._stream.state_dict()
        except Exception as error:
            raise self._failed("state_dict", error) from error
        rule, text = _not_json(state, "state"), ""
        if rule is None:
            text = json.dumps(state)
            if len(text) > STATE_BYTES:
                rule = f"state has {len(text):,} bytes as JSON; checkpoints hold {STATE_BYTES:,}"
        if rule is not None:
            fix = "numbers, texts, lists and dictionaries: a position and a seed, not the data"
            at = location(self._items.kind)
            raise DataError(f"{self._items.name}: state_dict, before item {self.sample}: {rule} "
                            f"({at}) -> {fix}")  # fmt: skip
        return text

    def _failed(self, what: str, error: Exception) -> ExtensionError:
        text = f"{what} raised {describe(error, self._items.kind)} -> correct it"
        return ExtensionError(f"{self._items.name}: {text}")


def _not_json(value: Any, name: str) -> str | None:
    """Return why a part of a state is not JSON; None if all of it is. A tuple becomes a list."""
    if value is None or isinstance(value, str | int):
        return None
    if isinstance(value, float):
        return None if np.isfinite(value) else f"{name} is {value}"
    if isinstance(value, list | tuple):
        rules = (_not_json(entry, f"{name}[{number}]") for number, entry in enumerate(value))
    elif isinstance(value, dict):
        if others := [key for key in value if not isinstance(key, str)]:
            return f"{name} has the key {others[0]!r}, and keys of JSON are texts"
        rules = (_not_json(entry, f"{name}[{key!r}]") for key, entry in value.items())
    else:
        return f"{name} is of type {type(value).__module__}.{type(value).__qualname__}"
    return next((rule for rule in rules if rule is not None), None)


class PositionedSamples:
    """Samples of a stream from a position on, in ascending order; see `Samples`. Thread-safe.
    `samples_per_step`: over all ranks."""

    masks_loss = True
    num_samples = NUM_SAMPLES

    def __init__(
        self, stream: SampleStream, samples_per_step: int, position: StreamPosition | None
    ) -> None:
        self.sequence_length = stream.items.sequence_length
        self.vocab_size = stream.items.vocab_size
        self.token_dtype = stream.token_dtype
        self.weighs_loss = bool(stream.items.weighs)
        self.items = stream.items
        self._stream, self._samples_per_step = stream, samples_per_step
        self._lock = Lock()
        self.restart(position)

    def restart(self, position: StreamPosition | None) -> None:
        """Continue at `position`; None: at the beginning. Nothing may be read meanwhile."""
        with self._lock:
            self._open = self._stream.open(position)
            self._first = self._open.sample
            self._positions = {self._first: self._open.position()}

    def fill(self, samples: Indices, rows: Indices, out: TokenRows) -> None:
        for sample, row in zip(samples.tolist(), rows.tolist(), strict=True):
            with self._lock:
                assert sample >= self._open.sample
                while self._open.sample < sample:  # of other ranks
                    self._next()
                put_item(self._next(), row, out)

    def describe(self, sample: int) -> str:
        return f"tokens of {self._stream.items.name}, item {sample},"

    def position_at(self, sample: int) -> StreamPosition:
        """Return the position at the end of a step, all of whose samples of this rank have been
        read, and at most a few steps more. Raises as `OpenStream`."""
        with self._lock:
            while self._open.sample < sample:
                self._next()
            return self._positions[sample]

    def _next(self) -> Item:
        item = self._open.next()
        if (self._open.sample - self._first) % self._samples_per_step == 0:
            self._positions[self._open.sample] = self._open.position()
            for old in list(self._positions)[:-_KEPT_POSITIONS]:
                del self._positions[old]
        return item


class StreamOrder:
    """Order of the samples of a stream: its own."""

    def windows(self, first_sample: int, count: int) -> Indices:
        return np.arange(first_sample, first_sample + count, dtype=np.int64)
