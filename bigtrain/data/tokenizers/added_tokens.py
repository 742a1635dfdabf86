"""A tokenizer with tokens added to it: control tokens of a chat template, words of a domain."""

from __future__ import annotations

from collections.abc import Sequence

from bigtrain.data.tokenizers.tokenizer import Tokenizer, describe, load_tokenizer
from bigtrain.errors import DataError


def add_tokens(
    name: str, plain: Sequence[str], special: Sequence[str]
) -> tuple[Tokenizer, dict[str, int]]:
    """The tokenizer `name` with `special` and then `plain` texts as tokens of their own; and the id
    of each.

    Their ids follow the highest that there is, so that all other tokens keep theirs. Raises
    DataError for a text that is empty, given twice or a token already, and as `load_tokenizer`.
    """
    texts = [*special, *plain]
    if not texts:
        raise DataError("nothing to add to the tokenizer -> --add-token or --add-special-token")
    base = load_tokenizer(name)
    huggingface = base.huggingface
    known = huggingface.get_vocab()
    for number, text in enumerate(texts):
        if not text.strip():
            raise DataError(f"a token to add is {text!r}: it must have other characters than space")
        if text in texts[:number]:
            raise DataError(f"the token {text} is to be added twice -> name it once")
        if text in known:
            raise DataError(
                f"{text} is a token of {name} already, with id {known[text]} -> leave it out"
            )
    huggingface.add_tokens(list(special), special_tokens=True)
    huggingface.add_tokens(list(plain))
    grown = huggingface.get_vocab()
    return describe(name, huggingface), {text: int(grown[text]) for text in texts}
