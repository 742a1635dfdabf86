"""Output of a run for users and tools: metrics.jsonl, starts.jsonl, the log, trackers.

Imports `system` and accelerate's trackers, not the session, which imports it; so do the loop,
`diagnostics` and `evaluation`. Start with `metrics`, whose docstring lists every field.
"""
