"""Output of a run for users and tools: metrics.jsonl, starts.jsonl, the log, trackers. Start with
`metrics`, whose docstring lists every field."""
