"""The directory of this host for a name that may be an address."""

from __future__ import annotations

from bigtrain.system.storage.stores import is_address


def local_path(name: str, *, weights: bool = True) -> str:
    """Return `name`, or for an address the directory of this host that has a copy. Raises as
    `bigtrain.system.storage.copies.local_copy`."""
    if not is_address(name):
        return name
    from bigtrain.system.storage.copies import local_copy

    return str(local_copy(name, weights=weights))
