"""Token datasets on disk: their format, their manifest, reading, writing, checking.

No torch and no tokenizer: numpy over files. Start with `format` (the files of a shard) and
`dataset` (all shards of a split as one); `block_checksums` verifies what is read.
"""
