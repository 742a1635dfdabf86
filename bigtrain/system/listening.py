"""Sockets for torch's store that listen at one address and not at all of a machine. Pure.

The store asks nobody for a password, and torch lets its server listen at every address.
"""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress


def listen_only_at(address: str, port: int) -> socket.socket | None:
    """A socket bound to `port` (0: any) of `address`, for TCPStore's ``master_listen_fd``.

    None where `address` is a name other than localhost, by which other hosts may know another
    address of this machine; where it is none of this machine's, as behind a translating router; and
    where the port is taken.
    """
    if address != "localhost":
        try:
            ipaddress.ip_address(address)
        except ValueError:
            return None
    return _bound(address, port)


def listen_where_reached(host: str, port: int) -> socket.socket | None:
    """As `listen_only_at`, also for a name: at the address that it has here, if others can reach
    that."""
    bound = _bound(host, port)
    if bound is not None and host != "localhost":
        own = ipaddress.ip_address(bound.getsockname()[0])
        if own.is_loopback and str(own) != host:  # Debian's 127.0.1.1
            bound.close()
            return None
    return bound


def is_loopback(address: str) -> bool:
    """Whether only processes of this machine can be at `address`."""
    if address == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False


def _bound(address: str, port: int) -> socket.socket | None:
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, _, _, _, place in found:
        bound = socket.socket(family)
        # As torch's own: a port whose last connections are closing can be used at once.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(place)
        except OSError:
            bound.close()
            continue
        return bound
    return None
