"""Inputs and their documents: discovery, opening, decompression, a reader per file format, and the
documents in a row.

Imports `shards` for the manifest's records; `chat`, `tokenizers`, `tokenize_job` and the commands
import it. Start with `discovery` and `formats`.
"""
