"""Rows that are already tokenized: token ids, and a mask of learned tokens. numpy only.

A row becomes a document as it is: no token is added, so it must contain its end. Keys as in
Hugging Face datasets: `input_ids`; `labels`, -100 where a token is not learned and otherwise equal
to `input_ids` (not shifted); `attention_mask`, 0 for padding, which is removed; `loss_mask`, 0 or
1 per token; `completion_mask` and `assistant_masks`, as in TRL: a token is learned where every
mask of the row is 1; `token_weights` or `loss_weights`, a factor of the loss per token, and
`weight`, a factor for the row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from bigtrain.data.documents.conversations import FACTOR, from_text
from bigtrain.data.documents.row_format import TOKEN_KEYS, Values
from bigtrain.data.tokenizers.chat_template import ConversationError

TRL_MASKS = ("completion_mask", "assistant_masks")
WEIGHTS_OF_TOKENS = ("token_weights", "loss_weights")
NOT_LEARNED = -100
"""Label of a token without loss, as in torch and transformers."""
PADDING = "padding"
"""Kind of what is removed and counted: tokens with attention_mask 0."""
ONE_BIT = "a token is learned or not, by one bit -> 0 or 1, or a factor in loss_weights"

Numbers = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float32]


@dataclass(frozen=True)
class TokenRow:
    """Tokens of a row, int64 [tokens]; `learned` bool [tokens]; `padding`: number of padding tokens
    that were removed; `weights` float32 [tokens], factors of the loss of learned tokens, None if
    all are 1."""

    tokens: Numbers
    learned: npt.NDArray[np.bool_]
    padding: int = 0
    weights: Weights | None = None

    def document(self, *, last_only: bool) -> bytes:
        """Return the row as the document that is tokenized: deterministic JSON."""
        tree: dict[str, Any] = {"input_ids": self.tokens}
        if not self.learned.all():
            tree["learned"] = self.learned.astype(np.int8)
        if self.padding:
            tree[PADDING] = self.padding
        if self.weights is not None:
            tree["weights"] = self.weights
        return orjson.dumps(tree, option=orjson.OPT_SERIALIZE_NUMPY)

    @classmethod
    def of_document(cls, tree: dict[str, Any]) -> TokenRow:
        """Return the row of a `document`, parsed."""
        tokens = np.array(tree["input_ids"], np.int64)
        learned = np.array(tree.get("learned", np.ones(len(tokens))), np.bool_)
        weights = np.array(tree["weights"], np.float32) if "weights" in tree else None
        return cls(tokens, learned, tree.get(PADDING, 0), weights)

    def require_in_vocabulary(self, vocab_size: int) -> None:
        """Raise ConversationError for a token that the tokenizer does not have."""
        wrong = np.flatnonzero((self.tokens < 0) | (self.tokens >= vocab_size))
        if len(wrong):
            position = int(wrong[0])
            raise ConversationError(
                f"token {position} of the row is {int(self.tokens[position])}, the tokenizer has "
                f"ids 0 to {vocab_size - 1} -> --tokenizer with the tokenizer that made the rows"
            )


def token_row(values: Values) -> TokenRow:
    """Return the row with the `values` of `TOKEN_KEYS`. Raise ConversationError if they
    contradict each other."""
    row = dict(zip(TOKEN_KEYS, values, strict=True))
    tokens = _integers(row["input_ids"], "input_ids")
    length = len(tokens)
    if not length:
        raise ConversationError("it has no tokens")

    # Masks of learned tokens, by the key for errors, must agree. A token with weight 0 is not
    # learned; unlearned tokens get weight 1, so that a row in which all are 1 stores no weights.
    masks: dict[str, npt.NDArray[np.bool_]] = {}
    if row["labels"] is not None:
        labels = _integers(row["labels"], "labels")
        _require_length(labels, "labels", length)
        masks["labels"] = _learned_by_labels(labels, tokens)
    attention = None
    if row["attention_mask"] is not None:
        attention = _bits(row["attention_mask"], "attention_mask", length)
    if row["loss_mask"] is not None:
        masks["loss_mask"] = _bits(row["loss_mask"], "loss_mask", length)
    trl_masks = {
        name: _bits(row[name], name, length) for name in TRL_MASKS if row[name] is not None
    }
    if trl_masks:
        masks[" and ".join(trl_masks)] = np.logical_and.reduce(list(trl_masks.values()))
    weights = _weights_of(row, length)
    learned = _agreed_mask(masks, length) & (weights != 0)
    weights = np.where(learned, weights, 1).astype(np.float32)
    stored_weights = None if (weights == 1).all() else weights

    # Padding is removed at both ends.
    if attention is None or attention.all():
        return TokenRow(tokens, learned, weights=stored_weights)
    attended_positions = np.flatnonzero(attention)
    if not len(attended_positions):
        raise ConversationError("its attention_mask is 0 for every token")
    first, end = int(attended_positions[0]), int(attended_positions[-1]) + 1
    if not attention[first:end].all():
        raise ConversationError(
            "its attention_mask has 0 between tokens with 1: only padding at the beginning and the "
            "end can be removed -> remove those tokens"
        )
    is_padding = ~attention
    if masks and learned[is_padding].any():
        position = int(np.flatnonzero(learned & is_padding)[0])
        raise ConversationError(
            f"token {position} is to be learned ({' and '.join(masks)}), and its attention_mask is "
            "0"
        )
    return TokenRow(
        tokens[first:end],
        learned[first:end],
        padding=length - (end - first),
        weights=None if stored_weights is None else stored_weights[first:end],
    )


def _weights_of(row: Mapping[str, Any], length: int) -> Weights:
    """Return the weights of the tokens of a row, times the weight of the row: float32 [length]."""
    weight_keys = [name for name in WEIGHTS_OF_TOKENS if row[name] is not None]
    if len(weight_keys) > 1:
        raise ConversationError(f"it has {' and '.join(weight_keys)} -> keep one of them")
    weights = np.ones(length, np.float32)
    for name in weight_keys:
        weights = _factors(row[name], name, length)
    if row["weight"] is None:
        return weights
    with np.errstate(over="ignore"):
        weights = weights * _factors([row["weight"]], "weight", 1)
    if not np.isfinite(weights).all():
        raise ConversationError(f"its weight times those of its tokens is too large: {FACTOR}")
    return weights


def _learned_by_labels(labels: Numbers, tokens: Numbers) -> npt.NDArray[np.bool_]:
    """Return the mask of the tokens with a label. Raise ConversationError for a wrong label."""
    wrong = np.flatnonzero((labels != NOT_LEARNED) & (labels != tokens))
    if len(wrong):
        position = int(wrong[0])
        are_next_tokens = (labels[:-1] == NOT_LEARNED) | (labels[:-1] == tokens[1:])
        is_shifted = len(tokens) > 1 and bool(are_next_tokens.all())
        fix = "labels of the same token, not of the next one" if is_shifted else "-100 or that id"
        raise ConversationError(
            f"labels has {int(labels[position])} at token {position}, whose input_ids has "
            f"{int(tokens[position])} -> {fix}"
        )
    learned: npt.NDArray[np.bool_] = labels != NOT_LEARNED
    return learned


def _agreed_mask(masks: dict[str, npt.NDArray[np.bool_]], length: int) -> npt.NDArray[np.bool_]:
    """Return the mask on which all `masks` agree."""
    learned = next(iter(masks.values()), np.ones(length, np.bool_))
    for name, mask in masks.items():
        different = np.flatnonzero(mask != learned)
        if len(different):
            first = next(iter(masks))
            raise ConversationError(
                f"{first} and {name} contradict each other at token {int(different[0])} -> keep "
                "one of them"
            )
    return learned


def _integers(value: object, name: str) -> Numbers:
    """Return the list of integers under key `name`. Raise ConversationError for other values."""
    value = from_text(value)
    if not isinstance(value, list | tuple | np.ndarray):
        raise ConversationError(f"its {name} is not a list of integers but {type(value).__name__}")
    try:
        numbers = np.asarray(value)
    except ValueError:
        raise ConversationError(f"its {name} is a list of lists -> one list per row") from None
    if numbers.ndim != 1:
        raise ConversationError(f"its {name} is a list of lists -> one list per row")
    largest = np.iinfo(np.int64).max
    if len(numbers) and numbers.dtype.kind not in "iu":
        # Name the first value because of which numpy has another type.
        wrong = next(
            (v for v in value if isinstance(v, bool) or not isinstance(v, int) or abs(v) > largest),
            value,
        )
        raise ConversationError(f"its {name} has {wrong!r}, which is not an integer of 64 bits")
    if numbers.dtype.kind == "u" and len(numbers) and int(numbers.max()) > largest:
        raise ConversationError(f"its {name} has {int(numbers.max())}, more than 63 bits hold")
    return numbers.astype(np.int64)


def _bits(value: object, name: str, length: int) -> npt.NDArray[np.bool_]:
    """Return the mask of `length` tokens under key `name`. Raise ConversationError otherwise."""
    value = from_text(value)
    if not isinstance(value, list | tuple | np.ndarray):
        raise ConversationError(f"its {name} is not a list of numbers but {type(value).__name__}")
    wrong = [v for v in value if isinstance(v, str) or v is None or v not in (0, 1)]
    if wrong:
        raise ConversationError(f"its {name} has {wrong[0]!r}: {ONE_BIT}")
    bits = np.array(value, np.bool_)
    _require_length(bits, name, length)
    return bits


def _factors(value: object, name: str, length: int) -> Weights:
    """Return the factors of losses under key `name`: `length` float32, finite, 0 or more."""
    value = from_text(value)
    if not isinstance(value, list | tuple | np.ndarray):
        raise ConversationError(f"its {name} is not a list of numbers but {type(value).__name__}")
    wrong = [v for v in value if not isinstance(v, int | float | np.number)]
    if wrong:
        raise ConversationError(f"its {name} has {wrong[0]!r}: {FACTOR}")
    _require_length(value, name, length)
    largest = float(np.finfo(np.float32).max)
    unusable = next((v for v in value if not 0 <= v <= largest), None)  # also NaN
    if unusable is not None:
        raise ConversationError(f"its {name} has {unusable!r}: {FACTOR}")
    return np.array(value, np.float32)


def _require_length(values: Sequence[Any] | npt.NDArray[Any], name: str, length: int) -> None:
    if len(values) != length:
        raise ConversationError(
            f"its {name} has {len(values)} values, and input_ids has {length} tokens"
        )
