"""Files that an input names, and their bytes: discovery, opening, decompression, lines.

Imports `shards` for the manifest's records; `documents`, `tokenize_job` and the commands import it.
Start with `discovery`.
"""
