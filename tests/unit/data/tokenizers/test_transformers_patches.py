"""Each private part of transformers that tokenizers need is there, and is what it was read as."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from bigtrain.data.tokenizers import transformers_patches as patches
from tests.support.contracts import Contract, has, public_functions, reads, takes, title


def parses() -> bool:
    """Also what only the extensions of transformers' environment know."""
    source = "{% generation %}{{ messages[0] }}{% endgeneration %}"
    return type(patches.template_syntax_tree(source)).__name__ == "Template"


CONTRACTS = [
    takes(
        patches.template_syntax_tree,
        lambda: chat_template_utils._compile_jinja_template,
        "chat_template",
    ),
    Contract(
        patches.template_syntax_tree,
        "_compile_jinja_template does not give a template with its environment any more",
        parses,
    ),
    has(patches.decodes_plainly, lambda: PreTrainedTokenizerFast, "_decode"),
    reads(patches.decodes_plainly, lambda: PreTrainedTokenizerFast.decode, "self._decode("),
]


@pytest.mark.parametrize("contract", CONTRACTS, ids=title)
def test_transformers_is_as_it_was_read(contract: Contract) -> None:
    contract.check("transformers")


def test_every_patch_has_a_contract() -> None:
    wanted = public_functions(patches)
    assert wanted - {contract.name for contract in CONTRACTS} == set()
