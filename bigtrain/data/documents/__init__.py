"""From bytes to documents: a reader for each kind of file, and what of a row is the document.

Imports `sources`. Start with `open_reader`, which takes the reader that a file needs; to add a file
format, add one to `line_readers` or `table_readers`.
"""
