"""Training of a byte-level BPE tokenizer on the text of a dataset, and adding of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bigtrain.data.shards.manifest import TokenizerRecord
from bigtrain.data.tokenizers.tokenizer import Tokenizer, describe, load_tokenizer
from bigtrain.errors import DataError, Problem
from bigtrain.settings.run_config import TokenizerSection

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
            f"{MIN_VOCAB_SIZE}"
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
    return describe("trained here", wrapped)


def add_tokens(
    name: str, plain: Sequence[str], special: Sequence[str]
) -> tuple[Tokenizer, dict[str, int]]:
    """Return the tokenizer `name` with `special` and then `plain` texts added as tokens, and their
    ids. Their ids follow the highest existing one. Raises DataError for a text that is empty, given
    twice or already a token, and as `load_tokenizer`."""
    texts = [*special, *plain]
    if not texts:
        raise DataError("nothing to add to the tokenizer -> --add-token or --add-special-token")
    base = load_tokenizer(name)
    vocabulary = base.huggingface.get_vocab()
    for number, text in enumerate(texts):
        if not text.strip():
            raise DataError(f"a token to add is {text!r}: it must have a non-space character")
        if text in texts[:number]:
            raise DataError(f"the token {text} is added twice -> name it once")
        if text in vocabulary:
            raise DataError(
                f"{text} is already a token of {name}, with id {vocabulary[text]} -> remove it"
            )
    return _grown(name, base.huggingface, plain, special)


def _grown(
    name: str, huggingface: Any, plain: Sequence[str], special: Sequence[str]
) -> tuple[Tokenizer, dict[str, int]]:
    huggingface.add_tokens(list(special), special_tokens=True)
    huggingface.add_tokens(list(plain))
    vocabulary = huggingface.get_vocab()
    return describe(name, huggingface), {text: int(vocabulary[text]) for text in (*special, *plain)}


def check_added_tokens(
    section: TokenizerSection, base: str, listed: TokenizerRecord, directory: str
) -> list[Problem]:
    """Check that shards made with the tokenizer in `directory` (in their manifest: `listed`) were
    made with `base` and the tokens that `section` adds to it. Loads both tokenizers."""
    key = "model.path" if section.base is None else "tokenizer.base"
    try:
        huggingface = load_tokenizer(base).huggingface
    except DataError as error:
        return [Problem(key, base, str(error), "tokenizer.base=DIRECTORY, or a hub name")]
    base_vocabulary = huggingface.get_vocab()
    for text in section.added:
        if text in base_vocabulary:
            rule = f"is already a token of {base}, with id {base_vocabulary[text]}"
            return [Problem(section.key_of(text), text, rule, "remove it")]
    grown, ids = _grown(base, huggingface, section.add_tokens, section.add_special_tokens)
    if grown.hash == listed.hash:
        return []
    try:
        data_tokenizer = load_tokenizer(directory).huggingface
    except DataError as error:
        return [Problem("data", directory, str(error))]
    return [
        _difference(
            section, base, listed, data_tokenizer, base_vocabulary=base_vocabulary, added_ids=ids
        )
    ]


def _difference(
    section: TokenizerSection,
    base: str,
    listed: TokenizerRecord,
    data_tokenizer: Any,
    *,
    base_vocabulary: dict[str, int],
    added_ids: dict[str, int],
) -> Problem:
    """Describe how the tokenizer of the data differs from `section`. added_ids: ids that the added
    tokens would get."""
    # The data's tokenizer must have all tokens of the base and, beyond them, only added ones.
    vocabulary = data_tokenizer.get_vocab()
    data_name = f"the tokenizer that the data was tokenized with ({listed.name})"
    beyond = sorted(vocabulary.keys() - base_vocabulary.keys(), key=lambda text: vocabulary[text])
    added = {token.content: token.special for token in data_tokenizer.added_tokens_decoder.values()}
    if not base_vocabulary.items() <= vocabulary.items() or not added.keys() >= {*beyond}:
        rule = f"{data_name} was made from another one"
        return Problem("tokenizer.base", base, rule, "name the one that it was made from")
    # The added tokens must be listed completely, in the right list, and in the order of the ids.
    if missing := [text for text in section.added if text not in vocabulary]:
        return Problem(
            section.key_of(missing[0]),
            missing,
            f"no tokens of {data_name}",
            "tokenize with them: bigtrain tokenizer --config RUN.yaml --output DIR, then bigtrain "
            "tokenize --tokenizer DIR",
        )
    special = {text for text, is_special in added.items() if is_special}
    if unlisted := [text for text in beyond if text not in section.added]:
        list_name = "add_special_tokens" if unlisted[0] in special else "add_tokens"
        ellipsis = ", ..." if len(unlisted) > 4 else ""
        rule = f"{data_name} has also {', '.join(unlisted[:4])}{ellipsis}"
        return Problem(f"tokenizer.{list_name}", None, rule, "add them too")
    for text in section.added:
        right = "add_special_tokens" if text in special else "add_tokens"
        if section.key_of(text) != f"tokenizer.{right}":
            rule = f"is a {'control' if text in special else 'plain'} token of {data_name}"
            return Problem(section.key_of(text), text, rule, f"name it in tokenizer.{right}")
        key = section.key_of(text)
        order = [new_text for new_text in beyond if section.key_of(new_text) == key]
        if vocabulary[text] != added_ids[text] and order != [*getattr(section, right)]:
            rule = (
                f"{text} has id {vocabulary[text]} in {data_name}, and would get {added_ids[text]}"
            )
            remedy = f"the order of the ids: [{', '.join(order)}]"
            return Problem(section.key_of(text), None, rule, remedy)
    rule = f"{data_name} has the same tokens, but finds them differently"
    return Problem("tokenizer.base", base, rule, "make it by bigtrain tokenizer --config RUN.yaml")
