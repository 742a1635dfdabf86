"""Encodes conversations to tokens and loss masks, which mark the tokens of the assistant.

Imports `documents`, `shards` and `tokenizers`; only `tokenize_job` imports it. Start with
`encoder`.
"""
