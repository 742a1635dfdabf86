"""Token datasets on disk: file format, manifest, reading, writing, verification.

No torch and no tokenizer: numpy over files. Imports `settings` and `system`; every other part of
the data layer, `run` and the commands may import it. Start with `format` (the files of a shard)
and `dataset` (all shards of a split); `block_checksums` verifies what is read.
"""
