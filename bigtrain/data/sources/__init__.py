"""Which files an input names, and their bytes: found, opened, decompressed, cut into lines.

The lowest room of the data layer. Start with `discovery`.
"""
