"""Files at an address (``s3://``, ``hf://``, ...), and writes that bypass the page cache.

Imports nothing but the standard library and, on first use, the library of a scheme; every
layer above may import it. Start with `open_store.store_of`, which returns the object of a scheme;
`remote_file` reads a remote file as an open file and resumes after a lost connection; `copies`
copies directories in both directions; `addresses` is pure. `direct_file`
bypasses the page cache.
"""
