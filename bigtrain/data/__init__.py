"""Layer 1: token shards, sample order and batches."""
