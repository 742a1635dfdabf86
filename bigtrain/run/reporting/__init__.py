"""Where figures leave a run: metrics.jsonl, the log, trackers."""
