"""Free ports, and sockets that bind a TCPStore's server to a single address. Pure.

A TCPStore has no authentication, and torch lets its server listen on every address.
"""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress


def try_port(port: int = 0, address: str = "", *, may_be_bound: bool = False) -> int:
    """Return `port`, or a free port if it is 0, of an address of this machine (default: all
    addresses). Raises OSError if the port is taken. may_be_bound: a socket that does not listen may
    hold the port for a store (SO_REUSEADDR, as torch's server has it)."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, may_be_bound)
        probe.bind((address, port))
        return int(probe.getsockname()[1])


def listen_only_at(address: str, port: int) -> socket.socket | None:
    """Return a socket bound to `port` (0: any) of `address`, for TCPStore's ``master_listen_fd``.

    None if `address` is a host name other than localhost (other hosts may resolve it to another
    address of this machine), if it is not an address of this machine (for example, behind NAT), and
    if the port is in use.
    """
    if address != "localhost":
        try:
            ipaddress.ip_address(address)
        except ValueError:
            return None
    return _bound(address, port)


def listen_where_reached(host: str, port: int) -> socket.socket | None:
    """Like `listen_only_at`, also for a host name: at the address it resolves to here, unless that
    is a loopback address, which other hosts cannot reach."""
    bound = _bound(host, port)
    if bound is not None and host != "localhost":
        ip = ipaddress.ip_address(bound.getsockname()[0])
        if ip.is_loopback and str(ip) != host:  # Debian's 127.0.1.1
            bound.close()
            return None
    return bound


def own_address(host: str) -> str:
    """Return the address of this machine to listen at, so that other hosts reach it as `host`:
    0.0.0.0, all addresses, if `host` does not resolve to an address of this machine, as behind
    NAT."""
    bound = listen_where_reached(host, 0)
    if bound is None:
        return "0.0.0.0"
    with bound:
        return str(bound.getsockname()[0])


def exposure(address: str) -> str:
    """Return who can connect to a server at `address`; an empty text if only this machine can."""
    if is_loopback(address):
        return ""
    return (
        "at all addresses of this machine"
        if address in ("", "0.0.0.0", "::")
        else f"at {address}, from other hosts"
    )


def is_loopback(address: str) -> bool:
    """Return whether `address` is a loopback address, which only this machine can reach."""
    if address == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False


def _bound(address: str, port: int) -> socket.socket | None:
    """Return a socket bound to the first usable address that `address` resolves to; None if there
    is none."""
    try:
        infos = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, _, _, _, socket_address in infos:
        bound = socket.socket(family)
        # Like torch's own socket: a port whose last connections are closing can be reused
        # immediately.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(socket_address)
        except OSError:
            bound.close()
            continue
        return bound
    return None
