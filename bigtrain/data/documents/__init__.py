"""Documents from bytes: a reader per file format, and selection of a row's document columns.

Imports `sources` and `shards`; `chat`, `tokenizers`, `tokenize_job` and the commands import it.
Start with `open_reader`, which selects the reader of a file; to add a file format, add a reader to
`line_readers` or `table_readers`.
"""
