"""Items of user code as samples: checked, and written to a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bigtrain.data.samples.token_stream import TokenRows
from bigtrain.data.shards.format import IGNORED_LABEL
from bigtrain.errors import DataError
from bigtrain.settings.extensions import location

_FIELDS = ("input_ids", "labels")

Item = tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]
"""Tokens of a sample, int64 [n], and whether each is a target, bool [n]."""


@dataclass(frozen=True)
class ItemReader:
    """Reader of items of the user as samples of at most `sequence_length` + 1 tokens. name: of the
    source, in errors. kind: its class."""

    name: str
    kind: type
    sequence_length: int
    vocab_size: int

    def parse(self, sample: int, item: Any) -> Item:
        """Return the sample that item number `sample` is. Raises DataError if it is not one."""
        if not isinstance(item, Mapping):
            item = {"input_ids": item}
        if unknown := sorted(item.keys() - {*_FIELDS}, key=str):
            raise self.wrong(sample, f"has {unknown[0]!r}", "return input_ids, and labels")
        if "input_ids" not in item:
            raise self.wrong(sample, "has no input_ids", "return input_ids, and labels")
        tokens = self._integers(sample, "input_ids", item["input_ids"])
        longest = self.sequence_length + 1
        if not 2 <= len(tokens) <= longest:
            rule = f"has {len(tokens)} tokens; a sample has 2 to {longest}"
            raise self.wrong(sample, rule, "split it, or set another batch.sequence_length")
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            rule = (
                f"has token {tokens.min()} or {tokens.max()}; the vocabulary is {self.vocab_size}"
            )
            raise self.wrong(sample, rule, "use the tokenizer of data.path")
        if item.get("labels") is None:
            return tokens, np.ones(len(tokens), np.bool_)
        labels = self._integers(sample, "labels", item["labels"])
        if len(labels) != len(tokens):
            rule = f"has {len(tokens)} input_ids and {len(labels)} labels"
            raise self.wrong(sample, rule, "one label for each token, not shifted")
        targets = labels != IGNORED_LABEL
        if (labels[targets] != tokens[targets]).any():
            index = int(np.flatnonzero(targets & (labels != tokens))[0])
            rule = f"labels[{index}] = {labels[index]} is not input_ids[{index}] = {tokens[index]}"
            raise self.wrong(sample, rule, f"the token itself, or {IGNORED_LABEL}; not shifted")
        return tokens, targets

    def _integers(self, sample: int, field: str, value: Any) -> npt.NDArray[np.int64]:
        try:
            array = np.asarray(value)
        except (TypeError, ValueError) as error:
            raise self.wrong(sample, f"{field}: {error}", "a list of integers") from error
        if array.ndim != 1 or array.dtype.kind not in "iu":
            rule = f"{field} is of type {array.dtype} and shape {list(array.shape)}"
            raise self.wrong(sample, rule, "a list of integers")
        return array.astype(np.int64)

    def wrong(self, sample: int, rule: str, fix: str) -> DataError:
        """Return the error of an item that is not a sample."""
        return DataError(f"{self.name}: item {sample} {rule} ({location(self.kind)}) -> {fix}")


def put_item(item: Item, row: int, out: TokenRows) -> None:
    """Write a sample to a row of `out`, padded at the end without loss."""
    assert out.loss_mask is not None
    tokens, targets = item
    out.tokens[row] = 0
    out.loss_mask[row] = False
    out.tokens[row, : len(tokens)] = tokens
    out.loss_mask[row, : len(tokens)] = targets
