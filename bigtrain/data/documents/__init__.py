"""From bytes to documents: a reader per file format, and which columns of a row are the document.

Imports `sources` and `shards`; `chat`, `tokenizers`, `tokenize_job` and the commands import it.
Start with `open_reader`, which chooses the reader of a file; to add a file format, add a reader to
`line_readers` or `table_readers`.
"""
