"""What others are given: a directory of Hugging Face's or of peft's, compared before it is named.

Imported by `run.checkpointing`; start reading with `verified`.
"""
