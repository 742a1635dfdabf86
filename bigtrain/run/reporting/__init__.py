"""Where figures leave a run: metrics.jsonl, starts.jsonl, the log, trackers."""
