"""Files at an address (``s3://``, ``hf://``, ...), and writes that bypass the page cache.

Imports nothing but the standard library and, on first use, the library of a scheme; every
layer above may import it. Start with `remote_file.store_of`, which returns the store of a scheme;
`remote_file` also reads a remote file as an open file and resumes after a lost connection; `copies`
copies directories in both directions. `direct_file` bypasses the page cache.
"""
