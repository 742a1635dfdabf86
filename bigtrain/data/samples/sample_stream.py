"""Samples from a stream of the user: an iterator with a state, which each checkpoint contains.

Sample ``i`` of a run is item ``i`` of the stream. Every process reads the complete stream and keeps
the items for its rows, so that the order does not depend on the number of ranks, and all processes
share one state. The cost: each process produces the items of the complete global batch.

The reader is ahead of the training. So it records the position of the stream where each step ends,
and a checkpoint contains the position at the end of the checkpoint's step.
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
"""Ends of steps whose positions are known: of the last step, and of steps that are read ahead."""


@dataclass(frozen=True)
class StreamPosition:
    """Position of a stream before its item `sample`. checksum: checksum of all previous items, 16
    hexadecimal digits. state: state of the stream, as decoded from JSON."""

    sample: int
    checksum: str
    state: Any

    @classmethod
    def from_json(cls, tree: Mapping[str, Any] | None) -> StreamPosition | None:
        """Build from `dataclasses.asdict`; None: a checkpoint without a stream."""
        return None if tree is None else cls(**tree)


class SampleStream:
    """Stream of the user, which every reader opens again. `make` returns a stream at its
    beginning."""

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
        have weights. Raises ExtensionError if the stream fails, DataError if it has other items
        when it is opened again, at its beginning or at a state that it returned."""
        # Read the first items, with the position before each item.
        stream = self.open(None)
        positions, contents, weighs = [], [], False
        for _ in range(_PROBES):
            positions.append(stream.position())
            item = stream.next()
            contents.append(_bytes_of(item))
            weighs |= item.weights is not None
        self.items = replace(self.items, weighs=weighs)
        # A resumed run opens a new stream, at its beginning or at a state: the items must be equal.
        middle = _PROBES // 2
        for first_item, position, change, fix in (
            (0, None, "the stream is made again", "let the items depend on the settings only"),
            (
                middle,
                positions[middle],
                f"a new stream gets the state from before item {middle}, by load_state_dict",
                "let state_dict() determine the next item, also while __iter__ is at a yield",
            ),
        ):
            reopened = self.open(position)
            for number in range(first_item, _PROBES):
                if _bytes_of(reopened.next()) != contents[number]:
                    rule = f"is another one when {change}, so that a run could not resume"
                    raise self.items.wrong(number, rule, fix)
        text = json.dumps([self.items.name, settings, self.items.sequence_length])
        return xxhash.xxh3_64_intdigest(text.encode() + b"".join(contents))


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
    """Iterator over the items of a stream from a position on. sample: number of the next item.
    After a failure it raises that error again: the number of the next item is unknown."""

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
    def load(stream: Any, items: ItemReader, state_text: str) -> None:
        """Set the state of a stream. Raises ExtensionError if that fails."""
        try:
            stream.load_state_dict(json.loads(state_text))
        except Exception as error:
            text = describe(error, items.source_class)
            raise ExtensionError(
                f"{items.name}: load_state_dict raised {text} -> correct "
                "it; the state is what state_dict returned, as JSON has it"
            ) from error

    def next(self) -> Item:
        """Return the next item as a sample. Raises ExtensionError if the stream fails, DataError if
        the stream has ended or the item is not a sample."""
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
            code_location = location(self._items.source_class)
            raise DataError(
                f"{self._items.name}: the stream ended after {self.sample} items, and the run "
                f"needs more ({code_location}) -> let __iter__ begin again (while True), or set a "
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
            code_location = location(self._items.source_class)
            raise DataError(f"{self._items.name}: state_dict, before item {self.sample}: {rule} "
                            f"({code_location}) -> {fix}")  # fmt: skip
        return text

    def _failed(self, operation: str, error: Exception) -> ExtensionError:
        text = f"{operation} raised {describe(error, self._items.source_class)} -> correct it"
        return ExtensionError(f"{self._items.name}: {text}")


def _not_json(value: Any, name: str) -> str | None:
    """Return why a part of a state is not JSON; None if it is JSON. A tuple becomes a list."""
    if value is None or isinstance(value, str | int):
        return None
    if isinstance(value, float):
        return None if np.isfinite(value) else f"{name} is {value}"
    if isinstance(value, list | tuple):
        rules = (_not_json(entry, f"{name}[{number}]") for number, entry in enumerate(value))
    elif isinstance(value, dict):
        if non_text_keys := [key for key in value if not isinstance(key, str)]:
            return f"{name} has the key {non_text_keys[0]!r}, and keys of JSON are texts"
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
        """Return the next item; record the position at the end of a step."""
        item = self._open.next()
        if (self._open.sample - self._first) % self._samples_per_step == 0:
            self._positions[self._open.sample] = self._open.position()
            for old in list(self._positions)[:-_KEPT_POSITIONS]:
                del self._positions[old]
        return item


class StreamOrder:
    """Order of the samples of a stream, which is the order of the items."""

    def windows(self, first_sample: int, count: int) -> Indices:
        return np.arange(first_sample, first_sample + count, dtype=np.int64)
