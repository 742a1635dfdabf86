"""Tokens that are added to a tokenizer, and whether shards were made with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bigtrain.data.shards.manifest import TokenizerRecord
from bigtrain.data.tokenizers.tokenizer import Tokenizer, from_huggingface, load_tokenizer
from bigtrain.errors import DataError, Problem
from bigtrain.settings.run_config import TokenizerSection


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
    """Add tokens to `huggingface`; return the tokenizer, and the ids of the added tokens."""
    huggingface.add_tokens(list(special), special_tokens=True)
    huggingface.add_tokens(list(plain))
    vocabulary = huggingface.get_vocab()
    ids = {text: int(vocabulary[text]) for text in (*special, *plain)}
    return from_huggingface(name, huggingface), ids


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
    # The data's tokenizer must have all tokens of the base; all its other tokens must be added.
    vocabulary = data_tokenizer.get_vocab()
    data_name = f"the tokenizer that the data was tokenized with ({listed.name})"
    extra = sorted(vocabulary.keys() - base_vocabulary.keys(), key=lambda text: vocabulary[text])
    added_tokens = data_tokenizer.added_tokens_decoder.values()
    has_base = base_vocabulary.items() <= vocabulary.items()
    if not has_base or not {token.content for token in added_tokens}.issuperset(extra):
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
    special = {token.content for token in added_tokens if token.special}
    if unlisted := [text for text in extra if text not in section.added]:
        list_name = "add_special_tokens" if unlisted[0] in special else "add_tokens"
        ellipsis = ", ..." if len(unlisted) > 4 else ""
        rule = f"{data_name} has also {', '.join(unlisted[:4])}{ellipsis}"
        return Problem(f"tokenizer.{list_name}", None, rule, "add them too")
    for text in section.added:
        list_name = "add_special_tokens" if text in special else "add_tokens"
        if section.key_of(text) != f"tokenizer.{list_name}":
            rule = f"is a {'control' if text in special else 'plain'} token of {data_name}"
            return Problem(section.key_of(text), text, rule, f"name it in tokenizer.{list_name}")
        key = section.key_of(text)
        right_order = [new_text for new_text in extra if section.key_of(new_text) == key]
        if vocabulary[text] != added_ids[text] and right_order != [*getattr(section, list_name)]:
            rule = (
                f"{text} has id {vocabulary[text]} in {data_name}, and would get {added_ids[text]}"
            )
            remedy = f"the order of the ids: [{', '.join(right_order)}]"
            return Problem(section.key_of(text), None, rule, remedy)
    rule = f"{data_name} has the same tokens, but finds them differently"
    return Problem("tokenizer.base", base, rule, "make it by bigtrain tokenizer --config RUN.yaml")
