"""Data loader: from samples to the micro-batches of one rank, prefetched by threads.

The top of the data layer: imports `samples`, `shards` and `tokenizers`; `engine`, `parity` and
`run` import it. Start with `loader`; `collator` makes a `micro_batch`.
"""
