"""Tokenizers: loading, training, identity, and fast encoders that are compared with the reference.

The only part of the data layer that imports transformers; `chat`, `tokenize_job`, `loading`,
`models` and the commands import it. Start with `tokenizer`; `equivalence` selects the fastest
encoder that agrees with it.
"""

from bigtrain.system.processes import hide_torchao_from_transformers

hide_torchao_from_transformers()
