"""From files of text to the micro-batches of one rank. Imports `system` and `settings`; no models.

In the order of the way: `sources` finds and opens files, `documents` reads documents out of them,
`tokenizers` and `chat` make tokens, `tokenize_job` divides that over workers and writes `shards`,
`samples` says which tokens sample i is, `loading` makes micro-batches of them.
"""
