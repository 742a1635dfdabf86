"""Training of a byte-level BPE tokenizer on the text of a dataset."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bigtrain.data.tokenizers.tokenizer import Tokenizer, from_huggingface
from bigtrain.errors import DataError

END_OF_DOCUMENT = "<|endoftext|>"

MIN_VOCAB_SIZE = 257
"""One token per byte and the end of document."""

# Llama 3's: words with one leading space or mark, digits in threes, runs of marks, line ends, and
# indentation separate from the word after it.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(batches: Iterable[Sequence[str]], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of `vocab_size` tokens on batches of texts. Every text can be encoded
    and decodes to itself. Id 0 is ``<|endoftext|>``, then the 256 bytes. Little text may give fewer
    merges than requested: see `vocab_size` of the result. Raises DataError for a `vocab_size` below
    257, and if there is no text."""
    if vocab_size < MIN_VOCAB_SIZE:
        raise DataError(
            f"--vocab-size {vocab_size} is too small: 256 bytes and {END_OF_DOCUMENT} need "
            f"{MIN_VOCAB_SIZE} -> {MIN_VOCAB_SIZE} or more"
        )
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    # Byte-level: every text can be encoded, and ids 1 to 256 are the bytes.
    backend: Any = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Count the characters that are read: without any text there is nothing to train on.
    num_characters = 0

    def counted() -> Iterator[Sequence[str]]:
        nonlocal num_characters
        for batch in batches:
            num_characters += sum(map(len, batch))
            yield batch

    backend.train_from_iterator(counted(), trainer)
    if not num_characters:
        raise DataError("no text to train a tokenizer on: every document is empty")
    wrapper: Any = PreTrainedTokenizerFast
    wrapped = wrapper(
        tokenizer_object=backend, eos_token=END_OF_DOCUMENT, clean_up_tokenization_spaces=False
    )
    return from_huggingface("trained here", wrapped)
