"""One interface to all storage systems from which files are read, and to which they are copied.

============== ================================================= ===================================
scheme         by                                                credentials
============== ================================================= ===================================
http, https    requests                                          ~/.netrc, or in the address
s3, gs, az     obstore                                           AWS_*, GOOGLE_*, AZURE_*, the
                                                                 machine's role
all others     the fsspec file system of that name (`hf` is      as that file system has them
               huggingface_hub's)                                (HF_TOKEN)
============== ================================================= ===================================
"""

from __future__ import annotations

from bigtrain.system.storage.addresses import scheme_of
from bigtrain.system.storage.fsspec_store import FsspecStore
from bigtrain.system.storage.http_store import HttpStore
from bigtrain.system.storage.object_store import ObjectStore
from bigtrain.system.storage.stores import Store


def store_of(address: str) -> Store:
    """Return the store for the scheme of `address`. Raise StorageError if the scheme is unknown."""
    scheme = scheme_of(address)
    if scheme in ("http", "https"):
        return HttpStore()
    if scheme in ("s3", "s3a", "gs", "az", "abfs", "abfss"):
        return ObjectStore()
    return FsspecStore(scheme)
