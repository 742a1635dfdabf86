"""Process environment from the operating system and launcher: rank and world size, cores, memory,
signals, ports, library versions, atomic file writes; the reader of command lines.

The lowest layer: imports `bigtrain.errors`, the standard library and xxhash only, and everything
may import it, also a probe on a bare host. Start with `world` (rank and world size) and `files`.
"""
