"""Files that are not simply opened: at an address (``s3://``, ``hf://``, ...), or past the cache.

Imports nothing but the standard library and, when it is called, the library of a scheme; every
layer above may import it. Start with `open_store.store_of`, which has one object for each scheme;
`remote_file` reads a file of one as an open file, and goes on where a connection broke; `copies`
copies directories there and back; `addresses` is pure. `direct_file`
writes past the page cache.
"""
