"""Items of user code as samples: checked, and written to a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bigtrain.data.samples.token_stream import TokenRows
from bigtrain.data.shards.format import IGNORED_LABEL, Weights
from bigtrain.errors import DataError
from bigtrain.settings.extensions import location

_FIELDS = ("input_ids", "labels", "loss_weights")
_FIX = "return input_ids, and labels and loss_weights if there are some"


class Item(NamedTuple):
    """Sample of the user. tokens: int64 [n]. targets: bool [n], whether a token is a target.
    weights: float32 [n], factors of the losses of the targets; None if all are 1."""

    tokens: npt.NDArray[np.int64]
    targets: npt.NDArray[np.bool_]
    weights: Weights | None = None

    @property
    def weight_bytes(self) -> bytes:
        """Content of the weights, for checksums; empty without them."""
        return b"" if self.weights is None else self.weights.tobytes()


@dataclass(frozen=True)
class ItemReader:
    """Reader of items of the user as samples of at most `sequence_length` + 1 tokens. name: name of
    the source in errors. weighs: whether items have ``loss_weights``, which decides before the run
    how its losses are computed; None: not known yet."""

    name: str
    source_class: type
    sequence_length: int
    vocab_size: int
    weighs: bool | None = None

    def parse(self, sample: int, item: Any) -> Item:
        """Return item number `sample` as a sample. Raises DataError if it is not a sample."""
        if not isinstance(item, Mapping):
            item = {"input_ids": item}
        if unknown_keys := sorted(item.keys() - {*_FIELDS}, key=str):
            raise self.wrong(sample, f"has {unknown_keys[0]!r}", _FIX)
        if "input_ids" not in item:
            raise self.wrong(sample, "has no input_ids", _FIX)
        # Tokens: as many as a sample has, all in the vocabulary.
        tokens = self._integers(sample, "input_ids", item["input_ids"])
        longest = self.sequence_length + 1
        if not 2 <= len(tokens) <= longest:
            rule = f"has {len(tokens)} tokens; a sample has 2 to {longest}"
            raise self.wrong(sample, rule, "split it, or set another batch.sequence_length")
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            index = int(np.flatnonzero((tokens < 0) | (tokens >= self.vocab_size))[0])
            rule = f"has input_ids[{index}] = {tokens[index]}; ids are 0 to {self.vocab_size - 1}"
            raise self.wrong(sample, rule, "use the tokenizer of data.path")
        # Targets: all tokens, or those whose label is the token itself.
        targets = np.ones(len(tokens), np.bool_)
        if item.get("labels") is not None:
            labels = self._integers(sample, "labels", item["labels"])
            if len(labels) != len(tokens):
                rule = f"has {len(tokens)} input_ids and {len(labels)} labels"
                raise self.wrong(sample, rule, "one label for each token, not shifted")
            targets = labels != IGNORED_LABEL
            if (labels[targets] != tokens[targets]).any():
                index = int(np.flatnonzero(targets & (labels != tokens))[0])
                label, token = labels[index], tokens[index]
                rule = f"labels[{index}] = {label} is not input_ids[{index}] = {token}"
                raise self.wrong(sample, rule, f"the token itself, or {IGNORED_LABEL}; not shifted")
        # Weights: a target whose loss has the factor 0 is not a target.
        weights = None
        if item.get("loss_weights") is not None:
            if self.weighs is False:
                rule = "has loss_weights, and the items that were read before the run have none"
                raise self.wrong(sample, rule, "give all items loss_weights, 1 for the usual loss")
            weights = self._weights(sample, item["loss_weights"], len(tokens))
            targets &= weights != 0
        return Item(tokens, targets, weights)

    def _weights(self, sample: int, value: Any, length: int) -> Weights:
        """Return factors of losses: finite, 0 or more, in float32."""
        array = self._array(sample, "loss_weights", value, "a list of numbers")
        if array.ndim != 1 or array.dtype.kind not in "iuf":
            rule = f"loss_weights is of type {array.dtype} and shape {list(array.shape)}"
            raise self.wrong(sample, rule, "a list of numbers")
        if len(array) != length:
            rule = f"has {length} input_ids and {len(array)} loss_weights"
            raise self.wrong(sample, rule, "one factor for each token, not shifted")
        with np.errstate(over="ignore"):
            weights = array.astype(np.float32)
        if not (usable := np.isfinite(weights) & (weights >= 0)).all():
            index = int(np.flatnonzero(~usable)[0])
            rule = f"loss_weights[{index}] is {array[index]}, a factor of a loss"
            raise self.wrong(sample, rule, "a finite number, 0 or more")
        return weights

    def _integers(self, sample: int, field: str, value: Any) -> npt.NDArray[np.int64]:
        array = self._array(sample, field, value, "a list of integers")
        if array.shape == (0,):
            return np.empty(0, np.int64)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            rule = f"{field} is of type {array.dtype} and shape {list(array.shape)}"
            raise self.wrong(sample, rule, "a list of integers")
        return array.clip(max=np.iinfo(np.int64).max).astype(np.int64)

    def _array(self, sample: int, field: str, value: Any, fix: str) -> npt.NDArray[Any]:
        try:
            return np.asarray(value)
        except Exception as error:  # of user code: for example, a tensor of another device
            raise self.wrong(sample, f"{field}: {error}", fix) from error

    def wrong(self, sample: int, rule: str, fix: str) -> DataError:
        """Return the error of an item that is not a sample."""
        return DataError(
            f"{self.name}: item {sample} {rule} ({location(self.source_class)}) -> {fix}"
        )


def put_item(item: Item, row: int, out: TokenRows) -> None:
    """Write a sample to a row of `out`; the padding at its end has no loss."""
    assert out.loss_mask is not None
    tokens, targets, weights = item
    out.tokens[row] = 0
    out.loss_mask[row] = False
    out.tokens[row, : len(tokens)] = tokens
    out.loss_mask[row, : len(tokens)] = targets
    if out.weights is not None and weights is not None:
        out.weights[row, : len(tokens)] = weights
