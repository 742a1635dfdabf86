"""What a dataset says about itself without any model. numpy only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bigtrain.data.manifest import Split
from bigtrain.data.shards import CHUNK_ITEMS, TokenDataset
from bigtrain.errors import DataError


def token_counts(dataset: TokenDataset, split: Split) -> npt.NDArray[np.int64]:
    """How often every token id occurs in `split`, int64 [vocab_size]. Reads all tokens, in chunks.

    Raises DataError where a token is not in the vocabulary (a damaged file).
    """
    vocab_size = dataset.manifest.tokenizer.vocab_size
    counts = np.zeros(vocab_size, dtype=np.int64)
    for shard in dataset.shards(split):
        for low in range(0, shard.num_tokens, CHUNK_ITEMS):
            tokens = shard.tokens[low : low + CHUNK_ITEMS]
            if tokens.min() < 0 or tokens.max() >= vocab_size:
                raise DataError(
                    f"{shard.bin_path} is damaged: token {tokens.min()} or {tokens.max()} is not "
                    f"in the vocabulary of {vocab_size} -> tokenize again"
                )
            counts += np.bincount(tokens, minlength=vocab_size)
    return counts


def unigram_entropy(dataset: TokenDataset) -> float:
    """Loss that a model without context reaches on the held-out split, in nats per token.

    The cross-entropy of the held-out tokens under the training split's token frequencies, with one
    added to every count (Laplace). A trained model must be well below it.

    Raises DataError where the dataset has no held-out tokens.
    """
    held_out = token_counts(dataset, "held_out")
    if not held_out.sum():
        raise DataError(
            f"{dataset.path} has no held-out tokens -> tokenize with --held-out FRACTION"
        )
    train = token_counts(dataset, "train") + 1
    log_probability = np.log(train) - np.log(train.sum())
    return float(-(held_out * log_probability).sum() / held_out.sum())
