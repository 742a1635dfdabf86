"""Private parts of transformers used for tokenizers, with the reasons. Read in transformers 5.23.

`bigtrain.models.transformers_patches` has patches for models; the folders must not import each
other.
`tests/unit/data/tokenizers/test_transformers_patches.py` has the contract tests.
"""

from __future__ import annotations

from typing import Any


def template_syntax_tree(source: str) -> Any:
    """Return a chat template as a jinja2 syntax tree, parsed in transformers' environment. Its
    `_compile_jinja_template` (utils/chat_template_utils.py:562) creates that environment, with
    extensions that some templates need. Raises jinja2.TemplateSyntaxError."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    compile_: Any = _compile_jinja_template
    return compile_(source).environment.parse(source)


def decodes_plainly(tokenizer: Any) -> bool:
    """Return whether a transformers tokenizer decodes exactly as `tokenizers` does. A class changes
    it in `decode` (tokenization_utils_base.py:2884) or in `_decode`
    (tokenization_utils_tokenizers.py:1150), which `decode` calls."""
    from transformers import PreTrainedTokenizerFast

    tokenizer_class, plain = type(tokenizer), PreTrainedTokenizerFast
    return tokenizer_class.decode is plain.decode and tokenizer_class._decode is plain._decode
