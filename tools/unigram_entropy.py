"""Print the loss of a model without context on a dataset's held-out split.

Argument: the directory of the dataset.
"""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt

from bigtrain.data.shards.dataset import TokenDataset, open_dataset
from bigtrain.data.shards.manifest import Split, corrupt
from bigtrain.errors import DataError

CHUNK_ITEMS = 1 << 22


def token_counts(dataset: TokenDataset, split: Split) -> npt.NDArray[np.int64]:
    """Return the count of every token id in `split`, int64 [vocab_size]. Reads all tokens, in
    chunks. Raises DataError if a token is not in the vocabulary (a corrupt file)."""
    vocab_size = dataset.table.tokenizer.vocab_size
    counts = np.zeros(vocab_size, dtype=np.int64)
    for shard in dataset.shards(split):
        for low in range(0, shard.num_tokens, CHUNK_ITEMS):
            tokens = shard.tokens[low : low + CHUNK_ITEMS]
            if tokens.min() < 0 or tokens.max() >= vocab_size:
                what = f"token {tokens.min()} or {tokens.max()} is not in the vocabulary of "
                raise corrupt(shard.bin_path, f"{what}{vocab_size}")
            counts += np.bincount(tokens, minlength=vocab_size)
    return counts


def unigram_entropy(dataset: TokenDataset) -> float:
    """Return the loss of a model without context on the held-out split, in nats per token. The
    cross-entropy under the training split's token frequencies, with one added to every count
    (Laplace). Raises DataError if the dataset has no held-out tokens."""
    held_out = token_counts(dataset, "held_out")
    if not held_out.sum():
        raise DataError(
            f"{dataset.path} has no held-out tokens -> tokenize with --held-out FRACTION"
        )
    train = token_counts(dataset, "train") + 1
    log_probability = np.log(train) - np.log(train.sum())
    return float(-(held_out * log_probability).sum() / held_out.sum())


if __name__ == "__main__":
    print(unigram_entropy(open_dataset(sys.argv[1])))
