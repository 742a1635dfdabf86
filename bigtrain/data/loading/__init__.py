"""From samples to the micro-batches of one rank, read ahead by threads.

The top of the data layer, what the engine's loop reads. Start with `loader`; `collator` makes a
`micro_batch`.
"""
