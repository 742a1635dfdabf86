"""Conversations to tokens and loss masks: which tokens the assistant wrote.

Imports `documents` and `tokenizers`. Start with `encoder`.
"""
